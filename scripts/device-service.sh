# For scripts that run tests on GPUs, sourced by them: CUDA's multi-process service, by which RANKS_PER_GPU ranks share
# a GPU. Without that variable, or where it is 1, nothing is started, and where CUDA_MPS_PIPE_DIRECTORY names a service,
# that is used. Who calls start_service calls stop_service in a trap.

if ((${RANKS_PER_GPU:-1} > 1)); then
    export WARPLINK_TEST_RANKS_PER_GPU=$RANKS_PER_GPU CUDA_DEVICE_MAX_CONNECTIONS=$((64 / RANKS_PER_GPU))
    PATH=$PATH:$(dirname "$(command -v nvidia-smi || echo /usr/local/nvidia/bin/nvidia-smi)")
fi

start_service() {
    ((${RANKS_PER_GPU:-1} > 1)) && [[ -z ${CUDA_MPS_PIPE_DIRECTORY:-} ]] || return 0
    service=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$service CUDA_MPS_LOG_DIRECTORY=$service
    nvidia-cuda-mps-control -d
}

# Ends the service with all of its processes: one that is stuck does not end when it is asked to.
stop_service() {
    [[ -n ${service:-} ]] || return 0
    echo quit | timeout 5 nvidia-cuda-mps-control >/dev/null 2>&1
    for process in $(pgrep -f nvidia-cuda-mps); do
        if grep -qzFx "CUDA_MPS_PIPE_DIRECTORY=$service" "/proc/$process/environ" 2>/dev/null; then
            kill -KILL "$process"
        fi
    done
    rm -rf "$service"
    unset service CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
