//! Every exported function: its name and parameters, declared once. The macro generates the function, its `pnccl` twin,
//! which profilers call, and the call of the real library.
//!
//! The signatures are those in NCCL's documentation and in generated bindings, with integers in place of enumerations,
//! and untyped pointers in place of structures that are only passed on.

use crate::abi::{
    CallConfig, Config, Handle, Properties, RawStream, Simulation, Team, UniqueId, WaitSignal,
    Window,
};
use crate::{calls, group, join, leave, memory, operators, properties, signals, status, windows};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Declares functions. `fn` functions run in `status::entry`, `op` functions also fail the group that they are called in,
/// `raw` functions return their result directly, and `real` functions exist only in the real library.
macro_rules! table {
    ($($how:ident $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $(= $body:path)?;)*) => {
        $(table!(@export $how $name($($argument: $type),*) ($($result)?) ($($body)?));)*

        /// The names of all functions; each has a twin with the prefix `p`.
        pub const NAMES: &[&str] = &[$(concat!("nccl", stringify!($name))),*];

        /// The real library's functions, resolved on first use.
        // Names and numbers of arguments are NCCL's.
        #[allow(non_snake_case, dead_code, clippy::too_many_arguments)]
        pub(crate) mod real {
            use super::*;
            use crate::real::Found;
            use crate::status::Outcome;

            $(table!(@real $how $name($($argument: $type),*) ($($result)?));)*
        }
    };
    (@export fn $name:ident($($argument:ident: $type:ty),*) () ($body:path)) => {
        table!(@twins $name($($argument: $type),*) c_int {
            status::entry(concat!("nccl", stringify!($name)), || {
                // SAFETY: the caller passes arguments as NCCL's documentation requires.
                unsafe { $body($($argument),*) }
            })
        });
    };
    (@export op $name:ident($($argument:ident: $type:ty),*) () ($body:path)) => {
        table!(@twins $name($($argument: $type),*) c_int {
            status::entry(concat!("nccl", stringify!($name)), || {
                // SAFETY: the caller passes arguments as NCCL's documentation requires.
                unsafe { $body($($argument),*) }.inspect_err(group::note)
            })
        });
    };
    (@export raw $name:ident($($argument:ident: $type:ty),*) ($result:ty) ($body:path)) => {
        table!(@twins $name($($argument: $type),*) $result { $body($($argument),*) });
    };
    (@export real $name:ident($($argument:ident: $type:ty),*) () ()) => {
        table!(@twins $name($($argument: $type),*) c_int {
            status::entry(concat!("nccl", stringify!($name)), || {
                // SAFETY: the arguments are passed on unchanged.
                let code = unsafe { real::$name($($argument),*) }?;
                status::Failure::check_real(code, concat!("nccl", stringify!($name)))
            })
        });
    };
    (@twins $name:ident($($argument:ident: $type:ty),*) $result:ty $body:block) => {
        const _: () = {
            #[unsafe(export_name = concat!("nccl", stringify!($name)))]
            unsafe extern "C" fn exported($($argument: $type),*) -> $result $body

            // A second function, since Rust has no aliases of symbols.
            #[unsafe(export_name = concat!("pnccl", stringify!($name)))]
            unsafe extern "C" fn twin($($argument: $type),*) -> $result $body
        };
    };
    (@real $how:ident $name:ident($($argument:ident: $type:ty),*) ()) => {
        table!(@real $how $name($($argument: $type),*) (c_int));
    };
    (@real $how:ident $name:ident($($argument:ident: $type:ty),*) ($result:ty)) => {
        /// The function of that name.
        ///
        /// # Safety
        /// The arguments must be as NCCL's documentation requires.
        pub(crate) unsafe fn $name($($argument: $type),*) -> Outcome<$result> {
            type Function = unsafe extern "C" fn($($type),*) -> $result;
            static FOUND: Found<Function> = Found::new();
            // SAFETY: the signature is that of the function of this name.
            let function = unsafe { FOUND.get(concat!("nccl", stringify!($name))) }?;
            // SAFETY: the arguments are guaranteed by the caller.
            Ok(unsafe { function($($argument),*) })
        }
    };
}

table! {
    // Versions and errors.
    fn GetVersion(version: *mut c_int) = properties::version;
    raw GetErrorString(result: c_int) -> *const c_char = status::error_string;
    raw GetLastError(comm: Handle) -> *const c_char = status::last_error;
    raw ResetDebugInit() -> () = crate::log::reset;
    fn CommGetAsyncError(comm: Handle, result: *mut c_int) = properties::async_error;

    // Creation of communicators.
    fn GetUniqueId(id: *mut UniqueId) = join::unique_id;
    op CommInitRank(comm: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int) = join::init_rank;
    op CommInitRankConfig(comm: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config)
        = join::init_rank_config;
    op CommInitRankScalable(
        comm: *mut Handle, ranks: c_int, rank: c_int, id_count: c_int, ids: *mut UniqueId, config: *mut Config,
    ) = join::init_rank_scalable;
    op CommInitAll(comms: *mut Handle, count: c_int, devices: *const c_int) = join::init_all;
    op CommSplit(comm: Handle, color: c_int, key: c_int, made: *mut Handle, config: *mut Config) = join::split;
    op CommShrink(
        comm: Handle, excluded: *mut c_int, count: c_int, made: *mut Handle, config: *mut Config, flags: c_int,
    ) = join::shrink;
    fn CommGetUniqueId(comm: Handle, id: *mut UniqueId) = join::unique_id_to_grow;
    op CommGrow(
        comm: Handle, ranks: c_int, id: *const UniqueId, rank: c_int, made: *mut Handle, config: *mut Config,
    ) = join::grow;

    // End of communicators.
    fn CommFinalize(comm: Handle) = leave::finalize;
    fn CommDestroy(comm: Handle) = leave::destroy;
    fn CommAbort(comm: Handle) = leave::abort;
    fn CommRevoke(comm: Handle, flags: c_int) = leave::revoke;
    fn CommSuspend(comm: Handle, flags: c_int) = leave::suspend;
    fn CommResume(comm: Handle) = leave::resume;

    // Properties of communicators.
    fn CommCount(comm: Handle, count: *mut c_int) = properties::count;
    fn CommCuDevice(comm: Handle, device: *mut c_int) = properties::device;
    fn CommUserRank(comm: Handle, rank: *mut c_int) = properties::user_rank;
    fn CommQueryProperties(comm: Handle, place: *mut Properties) = properties::query;
    fn CommMemStats(comm: Handle, which: c_int, value: *mut u64) = properties::memory_statistics;
    raw TeamWorld(comm: Handle) -> Team = properties::team_world;
    raw TeamLsa(comm: Handle) -> Team = properties::team_lsa;
    raw TeamRail(comm: Handle) -> Team = properties::team_rail;
    raw TeamCft(comm: Handle, mode: c_int) -> Team = properties::team_cft;
    raw TeamCftMultimem(comm: Handle) -> Team = properties::team_cft_multimem;
    raw TeamRankToWorld(comm: Handle, team: Team, rank: c_int) -> c_int = properties::team_rank_to_world;
    raw TeamRankToLsa(comm: Handle, team: Team, rank: c_int) -> c_int = properties::team_rank_to_lsa;

    // Collectives.
    op AllReduce(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, op: c_int, comm: Handle,
        stream: RawStream,
    ) = calls::all_reduce;
    op Broadcast(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: RawStream,
    ) = calls::broadcast;
    op Bcast(memory: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: RawStream)
        = calls::bcast;
    op Reduce(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, op: c_int, root: c_int,
        comm: Handle, stream: RawStream,
    ) = calls::reduce;
    op AllGather(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, comm: Handle, stream: RawStream,
    ) = calls::all_gather;
    op ReduceScatter(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, op: c_int, comm: Handle,
        stream: RawStream,
    ) = calls::reduce_scatter;
    op AlltoAll(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, comm: Handle, stream: RawStream,
    ) = calls::all_to_all;
    op Gather(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: RawStream,
    ) = calls::gather;
    op Scatter(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: RawStream,
    ) = calls::scatter;
    // Collectives with a per-call configuration.
    op AllReduceConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, op: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::all_reduce_with;
    op BroadcastConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::broadcast_with;
    op ReduceConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, op: c_int, root: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::reduce_with;
    op AllGatherConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::all_gather_with;
    op ReduceScatterConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, op: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::reduce_scatter_with;
    op AlltoAllConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::all_to_all_with;
    op GatherConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::gather_with;
    op ScatterConfig(
        input: *const c_void, output: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: RawStream,
        config: *const CallConfig,
    ) = calls::scatter_with;
    fn RedOpCreatePreMulSum(
        op: *mut c_int, scalar: *mut c_void, datatype: c_int, residence: c_int, comm: Handle,
    ) = operators::create;
    fn RedOpDestroy(op: c_int, comm: Handle) = operators::destroy;

    // Between two ranks.
    op Send(
        memory: *const c_void, count: usize, datatype: c_int, peer: c_int, comm: Handle, stream: RawStream,
    ) = calls::send;
    op Recv(
        memory: *mut c_void, count: usize, datatype: c_int, peer: c_int, comm: Handle, stream: RawStream,
    ) = calls::receive;
    op PutSignal(
        memory: *const c_void, count: usize, datatype: c_int, peer: c_int, window: Window, offset: usize,
        signal: c_int, context: c_int, flags: c_uint, comm: Handle, stream: RawStream,
    ) = signals::put_signal;
    op Signal(
        peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Handle, stream: RawStream,
    ) = signals::signal;
    op WaitSignal(count: c_int, awaited: *mut WaitSignal, comm: Handle, stream: RawStream) = signals::wait_signal;

    // Groups.
    fn GroupStart() = group::begin;
    fn GroupEnd() = group::end;
    fn GroupSimulateEnd(simulation: *mut Simulation) = group::simulate;

    // Memory.
    fn MemAlloc(memory: *mut *mut c_void, bytes: usize) = memory::allocate;
    fn MemFree(memory: *mut c_void) = memory::free;
    fn CommRegister(comm: Handle, memory: *mut c_void, bytes: usize, handle: *mut *mut c_void) = memory::register;
    fn CommDeregister(comm: Handle, handle: *mut c_void) = memory::deregister;
    op CommWindowRegister(
        comm: Handle, memory: *mut c_void, bytes: usize, window: *mut Window, flags: c_int,
    ) = windows::register;
    fn CommWindowDeregister(comm: Handle, window: Window) = windows::deregister;
    fn WinGetUserPtr(comm: Handle, window: Window, memory: *mut *mut c_void) = windows::user_pointer;
    real GetLsaMultimemDevicePointer(window: Window, offset: usize, pointer: *mut *mut c_void);
    real GetMultimemDevicePointer(window: Window, offset: usize, multimem: usize, pointer: *mut *mut c_void);
    fn GetLsaDevicePointer(window: Window, offset: usize, rank: c_int, pointer: *mut *mut c_void)
        = windows::lsa_pointer;
    fn GetPeerDevicePointer(window: Window, offset: usize, rank: c_int, pointer: *mut *mut c_void)
        = windows::peer_pointer;

    real GetMultimemDeviceLeInfo(window: Window, offset: usize, id: *mut c_void, place: *mut usize);
    real GetPeerDeviceLeInfo(window: Window, offset: usize, peer: c_int, id: *mut c_void, place: *mut usize);
    real GetCftDeviceLeInfo(
        window: Window, offset: usize, peer: c_int, team: Team, id: *mut c_void, place: *mut usize,
    );

    // Device communicators, which always belong to the real library.
    op DevCommCreate(comm: Handle, wanted: *const c_void, made: *mut c_void) = memory::device_communicator;
    fn DevCommDestroy(comm: Handle, made: *const c_void) = memory::end_device_communicator;
    real LsaBarrierCreateRequirement(team: Team, barriers: c_int, handle: *mut c_void, requirement: *mut c_void);
    fn GinBarrierCreateRequirement(
        comm: Handle, team: Team, barriers: c_int, handle: *mut c_void, requirement: *mut c_void,
    ) = memory::gin_barrier;
    real GinOutboxCreateRequirement(
        blocks: c_int, size_log2: c_int, handle: *mut c_void, requirement: *mut c_void,
    );
    real GinInboxA2ACreateRequirement(
        peers: Team, blocks: c_int, size_log2: c_int, handle: *mut c_void, requirement: *mut c_void,
    );
    raw LLA2ACalcSlots(most_elements: c_int, most_bytes: c_int) -> c_int = memory::all_to_all_slots;
    real LLA2ACreateRequirement(blocks: c_int, slots: c_int, handle: *mut c_void, requirement: *mut c_void);

    // Only in the real library: its sockets between machines, and its parameters.
    real SetEncryption(config: *const c_void);
    real ParamBind(parameter: *mut *mut c_void, key: *const c_char);
    real ParamGetI8(parameter: *mut c_void, value: *mut i8);
    real ParamGetI16(parameter: *mut c_void, value: *mut i16);
    real ParamGetI32(parameter: *mut c_void, value: *mut i32);
    real ParamGetI64(parameter: *mut c_void, value: *mut i64);
    real ParamGetU8(parameter: *mut c_void, value: *mut u8);
    real ParamGetU16(parameter: *mut c_void, value: *mut u16);
    real ParamGetU32(parameter: *mut c_void, value: *mut u32);
    real ParamGetU64(parameter: *mut c_void, value: *mut u64);
    real ParamGetStr(parameter: *mut c_void, value: *mut *const c_char);
    real ParamGet(parameter: *mut c_void, value: *mut c_void, most: c_int, length: *mut c_int);
    real ParamGetParameter(key: *const c_char, value: *mut *const c_char, length: *mut c_int);
    real ParamGetAllParameterKeys(keys: *mut *mut *const c_char, count: *mut c_int);
    raw ParamDumpAll() -> () = properties::dump_parameters;
}
