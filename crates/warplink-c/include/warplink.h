// Warplink for C and C++: one-sided communication between GPUs. docs/c.md explains it.
//
// Made from the sources of crates/warplink-c by cbindgen; a test keeps it up to date.
//
// # Errors
// Every function that can fail returns a warplink_status. warplink_last_error says what happened, to whom, what
// was expected and what to do; it is the calling thread's. No function throws, and none ends the process.
//
// The text of a function names what it fails with beside what all have in common: null pointers where the text does not
// allow them, handles that never were, and handles of different communicators in one call are
// WARPLINK_STATUS_INVALID_ARGUMENT, calls in the wrong order WARPLINK_STATUS_INVALID_USAGE. Where ranks were lost, calls
// that concern them are WARPLINK_STATUS_PEER_LOST. A call of the driver's that fails is WARPLINK_STATUS_DRIVER.
//
// Functions that are passed to Warplink, log handlers and bodies of host kernels, must return: an exception that
// leaves one, or a thread that ends in one, ends the process with a message. In C++, declare them noexcept.
//
// # Handles
// Communicators, regions, streams, buffers, modules, kernels, collectives, bound calls and layers of experts are
// numbers, passed by value. Zero is none. One that was given back, or whose communicator was destroyed, is refused with
// WARPLINK_STATUS_CLOSED, for as long as the process runs.
//
// # Pointers
// A pointer must be null or point to what its type and the function's text say; null is refused where the text
// does not allow it. Outputs are written only where a call succeeds. Pointers are not kept, except the
// user pointers of host kernels and of the log handler, and memory that is registered. Text is UTF-8.
//
// # Threads
// Every function may be called on any thread, by several at the same time, also with the same handle. What one
// thread gives back or destroys while another's call uses it stays until that call returns. Set up a
// communicator's connections and register its buffers on one thread at a time, as peers are matched by the order
// of the calls. A child process that was forked after the first call may not call anything.
//
// # Blocking
// What waits for other ranks says so. Such waits end at the timeout (warplink_options), and within seconds when
// a rank is lost, with an error that names it. What is enqueued on a stream is done later, in the order of the calls.
//
// # Host kernels
// The warplink_block_... calls are for the bodies of kernels of the host device, on the thread that runs one; on others
// they are WARPLINK_STATUS_INVALID_USAGE. `argument` is a number among the arguments of the launch, from 0 on. `channel` is
// the number of an argument that warplink_argument_channel made, or one that warplink_block_channel gives for a channel of
// an array. An argument that is not there or is of another kind, and bytes that pass the end of a region, are
// WARPLINK_STATUS_INVALID_ARGUMENT, and nothing is done. The calls of channels are those of warplink::Channel in
// warplink/device.cuh, made by a whole block. Offsets and lengths are in bytes. A call fails where a rank was lost, where
// this rank has failed and, on a proxied channel, where the proxy was stopped; one that blocks ends then.


#ifndef WARPLINK_H
#define WARPLINK_H

#include <stddef.h>
#include <stdint.h>

/// The version of this header: major.
#define WARPLINK_VERSION_MAJOR 0

/// The version of this header: minor. Before 1.0 every minor version may change the interface.
#define WARPLINK_VERSION_MINOR 1

/// The version of this header: patch.
#define WARPLINK_VERSION_PATCH 0

/// What a function returns. `warplink_last_error` says more.
typedef enum {
    /// The call did what it says.
    WARPLINK_STATUS_SUCCESS = 0,
    /// Invalid argument: a length, a rank, an alignment, a combination of options.
    WARPLINK_STATUS_INVALID_ARGUMENT = 1,
    /// Calls were made in the wrong order.
    WARPLINK_STATUS_INVALID_USAGE = 2,
    /// The object was closed, or its resource was freed.
    WARPLINK_STATUS_CLOSED = 3,
    /// A wait exceeded its deadline.
    WARPLINK_STATUS_TIMEOUT = 4,
    /// A rank died, aborted or was dropped without being closed, or its connection broke.
    WARPLINK_STATUS_PEER_LOST = 5,
    /// A rank left in order while others still depended on it.
    WARPLINK_STATUS_PEER_LEFT = 6,
    /// The other ranks have given up on this one: it was silent for longer than the heartbeat limit, or its
    /// connection was cut.
    WARPLINK_STATUS_GIVEN_UP = 7,
    /// A rank failed before its part of a common operation; the message states its error.
    WARPLINK_STATUS_PEER_FAILED = 8,
    /// Two ranks disagree: on world sizes, lengths of a send and its receive, protocols.
    WARPLINK_STATUS_MISMATCH = 9,
    /// A handle is truncated, altered, stale or of another version.
    WARPLINK_STATUS_INVALID_HANDLE = 10,
    /// A joining process does not have the secret.
    WARPLINK_STATUS_AUTHENTICATION = 11,
    /// Received data violates the protocol.
    WARPLINK_STATUS_PROTOCOL = 12,
    /// The address to listen on is in use.
    WARPLINK_STATUS_ADDRESS_IN_USE = 13,
    /// A driver or vendor library call failed; the error has its code.
    WARPLINK_STATUS_DRIVER = 14,
    /// A library loaded at run time is missing, or lacks a symbol.
    WARPLINK_STATUS_LIBRARY_MISSING = 15,
    /// The device, the driver or the allocation does not support this.
    WARPLINK_STATUS_UNSUPPORTED = 16,
    /// Device or shared memory is exhausted.
    WARPLINK_STATUS_OUT_OF_MEMORY = 17,
    /// Text could not be parsed.
    WARPLINK_STATUS_PARSE = 18,
    /// An operating-system call failed.
    WARPLINK_STATUS_IO = 19,
    /// A bug in the library; please report it.
    WARPLINK_STATUS_INTERNAL = 20,
    /// A program failed verification.
    WARPLINK_STATUS_VERIFICATION = 21,
} warplink_status;

/// How the bytes of a connection reach the peer; the same on both ranks.
typedef enum {
    /// Chosen by where the peer is: direct where its memory can be mapped, the network where it is on another
    /// machine.
    WARPLINK_TRANSPORT_AUTO = 0,
    /// The kernel itself stores to and loads from the peer's memory, which is mapped. The device must have
    /// atomic operations on that memory, as GPUs have over NVLink.
    WARPLINK_TRANSPORT_DIRECT = 1,
    /// A thread of the host has the device's copy engine move the bytes, when kernels ask it to: to the
    /// peer's memory, or through memory of the host that both devices map, where they cannot map each
    /// other's.
    WARPLINK_TRANSPORT_PROXIED = 2,
    /// A thread of the host sends the bytes over the network (UCX), when kernels ask it to: to ranks of other
    /// machines, or of this one where that is wanted.
    WARPLINK_TRANSPORT_NETWORK = 3,
} warplink_transport;

/// How urgent a message is.
typedef enum {
    /// Something failed.
    WARPLINK_LOG_LEVEL_ERROR = 1,
    /// Something is not as it should be.
    WARPLINK_LOG_LEVEL_WARN = 2,
    /// Normal progress.
    WARPLINK_LOG_LEVEL_INFO = 3,
    /// In detail.
    WARPLINK_LOG_LEVEL_DEBUG = 4,
    /// In all detail.
    WARPLINK_LOG_LEVEL_TRACE = 5,
} warplink_log_level;

/// Which collective.
typedef enum {
    /// Every rank gets the reduction of all ranks' inputs.
    WARPLINK_COLLECTIVE_KIND_ALL_REDUCE = 0,
    /// Every rank gets the inputs of all, in rank order.
    WARPLINK_COLLECTIVE_KIND_ALL_GATHER = 1,
    /// Every rank gets its part of the reduction of all ranks' inputs.
    WARPLINK_COLLECTIVE_KIND_REDUCE_SCATTER = 2,
    /// Part p of a rank's output is that rank's part of rank p's input.
    WARPLINK_COLLECTIVE_KIND_ALL_TO_ALL = 3,
    /// Every rank gets the root's input.
    WARPLINK_COLLECTIVE_KIND_BROADCAST = 4,
    /// The root gets the reduction of all ranks' inputs.
    WARPLINK_COLLECTIVE_KIND_REDUCE = 5,
    /// The root gets the inputs of all, in rank order.
    WARPLINK_COLLECTIVE_KIND_GATHER = 6,
    /// Every rank gets its part of the root's input.
    WARPLINK_COLLECTIVE_KIND_SCATTER = 7,
    /// No rank proceeds until all have arrived.
    WARPLINK_COLLECTIVE_KIND_BARRIER = 8,
} warplink_collective_kind;

/// The type of elements.
typedef enum {
    /// IEEE 754 single precision.
    WARPLINK_ELEMENT_TYPE_F32 = 0,
    /// IEEE 754 double precision.
    WARPLINK_ELEMENT_TYPE_F64 = 1,
    /// IEEE 754 half precision.
    WARPLINK_ELEMENT_TYPE_F16 = 2,
    /// bfloat16: the upper half of a 32-bit float.
    WARPLINK_ELEMENT_TYPE_BF16 = 3,
    /// Float of 8 bits with 4 bits of exponent, without infinities.
    WARPLINK_ELEMENT_TYPE_F8E4M3 = 4,
    /// Float of 8 bits with 5 bits of exponent.
    WARPLINK_ELEMENT_TYPE_F8E5M2 = 5,
    /// Signed byte.
    WARPLINK_ELEMENT_TYPE_I8 = 6,
    /// Unsigned byte.
    WARPLINK_ELEMENT_TYPE_U8 = 7,
    /// Signed 32-bit integer.
    WARPLINK_ELEMENT_TYPE_I32 = 8,
    /// Unsigned 32-bit integer.
    WARPLINK_ELEMENT_TYPE_U32 = 9,
    /// Signed 64-bit integer.
    WARPLINK_ELEMENT_TYPE_I64 = 10,
    /// Unsigned 64-bit integer.
    WARPLINK_ELEMENT_TYPE_U64 = 11,
} warplink_element_type;

/// How inputs are reduced.
typedef enum {
    /// Nothing is reduced.
    WARPLINK_REDUCE_OP_NONE = 0,
    /// Sum.
    WARPLINK_REDUCE_OP_SUM = 1,
    /// Maximum.
    WARPLINK_REDUCE_OP_MAX = 2,
    /// Minimum.
    WARPLINK_REDUCE_OP_MIN = 3,
    /// Product.
    WARPLINK_REDUCE_OP_PRODUCT = 4,
    /// Sum divided by the number of values; integer division truncates.
    WARPLINK_REDUCE_OP_AVERAGE = 5,
    /// Sum of the values multiplied by the factor; floats only.
    WARPLINK_REDUCE_OP_SCALED_SUM = 6,
} warplink_reduce_op;

/// Which way a message goes.
typedef enum {
    /// From this rank to the peer.
    WARPLINK_DIRECTION_SEND = 0,
    /// From the peer to this rank.
    WARPLINK_DIRECTION_RECEIVE = 1,
} warplink_direction;

/// What ranks have of the rows of a fused collective. Where a rank owns rows, these are as many on each, in rank order.
typedef enum {
    /// Every rank has all rows of everything.
    WARPLINK_FUSED_KIND_ALL_REDUCE = 0,
    /// The same, but the residual, the sum and `residual_out` are of the rows that a rank owns.
    WARPLINK_FUSED_KIND_ALL_REDUCE_SHARDED = 1,
    /// The input is of all rows, all else of those that a rank owns.
    WARPLINK_FUSED_KIND_REDUCE_SCATTER = 2,
    /// Nothing is added up but the residual: the input, the residual, the sum and `residual_out` are of the
    /// rows that a rank owns, and the others of all rows.
    WARPLINK_FUSED_KIND_ALL_GATHER = 3,
} warplink_fused_kind;

/// How rows are normalised.
typedef enum {
    /// They are not.
    WARPLINK_NORM_NONE = 0,
    /// By the root of the mean of squares.
    WARPLINK_NORM_RMS = 1,
    /// By mean and variance.
    WARPLINK_NORM_LAYER = 2,
} warplink_norm;

/// How rows are quantised. Scales that are computed are at least 1e-10.
typedef enum {
    /// They are not.
    WARPLINK_QUANTIZATION_NONE = 0,
    /// Divided by a scale that is given, one `f32`.
    WARPLINK_QUANTIZATION_STATIC = 1,
    /// Divided by a scale of each row, which is an output: its largest magnitude / 448.
    WARPLINK_QUANTIZATION_PER_TOKEN = 2,
    /// The same of each block of 128 elements, of which the last one of a row may be shorter.
    WARPLINK_QUANTIZATION_PER_BLOCK = 3,
    /// The same of blocks, with the next power of two from that scale on.
    WARPLINK_QUANTIZATION_PER_BLOCK_POWER_OF_TWO = 4,
    /// Mxfp8: divided by a scale of each 32 elements, the next power of two from their largest magnitude /
    /// 448 on, which is stored as a byte, the power's exponent plus 127 (e8m0). At least 2⁻¹²⁶.
    WARPLINK_QUANTIZATION_MXFP8 = 5,
    /// Nvfp4: floats of 4 bits (e2m1), two in a byte, the first in its low bits. Each 16 elements have a
    /// scale, as e4m3, row by row: their largest magnitude / 6, times a global scale that is given, one
    /// `f32`, positive and from 1e-30 to 1e30, usually 448 · 6 / the largest magnitude of all. So an element
    /// is about its float · its scale / the global one. Infinities and what is too large become 6; a block
    /// with a NaN has NaN for its scale.
    WARPLINK_QUANTIZATION_NVFP4 = 6,
} warplink_quantization;

/// How rows of a fused collective travel between ranks. All ranks get the same bits either way.
typedef enum {
    /// Without rounding more than the call itself.
    WARPLINK_WIRE_EXACT = 0,
    /// As floats of 8 bits (e4m3), and a scale for each block of 128 elements: half the bytes of 16-bit
    /// floats, for an error that docs/fused.md states.
    WARPLINK_WIRE_FP8 = 1,
} warplink_wire;

/// How a rank joins. Get one from `warplink_options_default`, and change what is to differ.
typedef struct {
    /// Bytes of this struct, which tell the version of the header; as `warplink_options_default` set it.
    size_t size;
    /// "host" or "cuda". Null: what WARPLINK_DEVICE says, else a GPU where there is one.
    const char *device;
    /// Which of the GPUs that the process sees. -1: the one of the local rank, or the only one.
    int32_t ordinal;
    /// The number among the ranks on this machine. -1: what WARPLINK_LOCAL_RANK says, else the rank.
    int32_t local_rank;
    /// The text that admits to a job that meets at an address; the same on every rank, long and random. Null:
    /// WARPLINK_SECRET. A unique id brings a secret of its own.
    const char *secret;
    /// The limit of every wait on the host after joining, in seconds. 0: WARPLINK_TIMEOUT, else 60. Joining has that of
    /// `warplink_set_bootstrap_timeout`.
    double timeout;
} warplink_options;

/// Rendezvous of the ranks of a job: an address and the secret that admits to it. A process that holds it can
/// join, so treat it as a password. Plain bytes: hand it to the other ranks in any way.
typedef struct {
    /// Private to the library.
    uint8_t bytes[128];
} warplink_unique_id;

/// This rank among the others. Zero is none.
typedef struct {
    uint64_t id;
} warplink_comm;

/// Memory of this rank that peers may reach. Zero is none.
typedef struct {
    uint64_t id;
} warplink_region;

/// A part of a region of this rank.
typedef struct {
    /// The region.
    warplink_region region;
    /// Bytes from its start.
    uint64_t offset;
    /// Length in bytes.
    uint64_t bytes;
} warplink_span;

/// An ordered queue of device work. Zero is none.
typedef struct {
    uint64_t id;
} warplink_stream;

/// A channel as kernels have it: the same bytes as `warplink::Channel` in `warplink/device.cuh`. Pass it by
/// value to a kernel that is launched by other means than `warplink_launch`. `peer` and `tag` say which connection
/// it is; its other members are private to the library.
typedef struct {
    uint64_t local;
    uint64_t local_bytes;
    uint64_t remote;
    uint64_t remote_bytes;
    uint64_t inbound;
    uint64_t awaited;
    uint64_t outbound;
    uint64_t completed;
    uint64_t abort;
    uint64_t windows;
    uint64_t ring;
    uint64_t head;
    uint64_t tail;
    uint64_t tag;
    uint32_t slots;
    uint32_t connection;
    uint32_t peer;
    uint32_t proxied;
} warplink_channel;

/// A place in one of a connection's regions.
typedef struct {
    /// 0 is the region that the connection was made with; registered buffers follow.
    uint32_t region;
    /// Bytes from its start.
    uint64_t offset;
} warplink_at;

/// A region that was added to all connections. Zero is none.
typedef struct {
    uint64_t id;
} warplink_buffer;

/// The body of a kernel for the host device: it runs once for each block of a launch, all at the same time, and
/// makes the `warplink_block_...` calls. It returns `WARPLINK_STATUS_SUCCESS`, or what a call returned: then the
/// kernel's stream fails with that call's error. Other calls of Warplink are refused with WARPLINK_STATUS_INVALID_USAGE. It
/// must return: one that throws ends the process. In C++, declare it `noexcept`.
typedef int32_t (*warplink_host_kernel_body)(void *user);

/// A kernel for the host device.
typedef struct {
    /// Its name, the same as that of the kernel in CUDA C++.
    const char *name;
    /// Its body.
    warplink_host_kernel_body body;
    /// Passed to the body; valid for as long as the module and its kernels. Blocks use it at the same time.
    void *user;
} warplink_host_kernel;

/// Contents of a module: CUDA C++ or machine code for GPUs, bodies for the host device, or both. Set what is
/// not there to zero.
typedef struct {
    /// A name, for messages.
    const char *name;
    /// CUDA C++, compiled by NVRTC for the GPU at hand; kernels are extern "C". It may include
    /// `<warplink/device.cuh>`, which is found by itself.
    const char *cuda;
    /// Instead of that, code for the GPU at hand that nvcc made: the bytes of a whole cubin, fat binary, or PTX file.
    const void *image;
    /// How many bytes.
    size_t image_bytes;
    /// Options for NVRTC, such as "-DBLOCK=256".
    const char *const *options;
    /// How many options.
    size_t option_count;
    /// Kernels for the host device.
    const warplink_host_kernel *host_kernels;
    /// How many there are.
    size_t host_kernel_count;
} warplink_module_source;

/// Code that was loaded into the device. Zero is none.
typedef struct {
    uint64_t id;
} warplink_module;

/// A kernel of a module. Zero is none.
typedef struct {
    uint64_t id;
} warplink_kernel;

/// The shape of a launch: a grid of blocks of threads, each of one dimension.
typedef struct {
    /// Blocks. On the host device, a body runs for each.
    uint32_t blocks;
    /// Threads of a block.
    uint32_t threads;
    /// Bytes of dynamic shared memory of a block.
    uint32_t shared_bytes;
    /// Not 0: only with all blocks on the device at the same time, so that they may wait for one another.
    uint32_t together;
} warplink_shape;

/// The value of a kernel's parameter, made by `warplink_argument_...`. Its members are private to the library.
typedef struct {
    uint32_t kind;
    int32_t peer;
    uint64_t handle;
    uint64_t value;
} warplink_argument;

/// How collectives are done; the same on every rank but for the address of `communicator`. Start from
/// `warplink_collective_options_default`.
typedef struct {
    /// Bytes of each rank's workspace.
    size_t workspace_bytes;
    /// "direct" for kernels that store into memory of the peers, "engine" for the vendor's library (NCCL on GPUs);
    /// null for the direct path wherever it serves.
    const char *path;
    /// An ncclComm_t of the same ranks in the same order, for what goes to the library; null to have one made. It stays
    /// the caller's: it is neither destroyed nor aborted here, and must be neither until
    /// `warplink_collectives_free` was called and the streams of its calls are done. No other thread may use it while a
    /// collective is enqueued.
    void *communicator;
    /// The only algorithm that is allowed on the direct path, such as "one-shot"; null to have one chosen for each
    /// call. docs/collectives.md lists them.
    const char *algorithm;
    /// The most multiprocessors that a call takes on the direct path, at least 2; 0 for the fewest that are fast.
    uint32_t multiprocessors;
} warplink_collective_options;

/// Collectives of all ranks. Zero is none.
typedef struct {
    uint64_t id;
} warplink_collectives;

/// A call of a collective, the same on every rank.
typedef struct {
    /// A `warplink_collective_kind`.
    int32_t kind;
    /// A `warplink_element_type`.
    int32_t element_type;
    /// A `warplink_reduce_op`; `WARPLINK_REDUCE_OP_NONE` where nothing is reduced.
    int32_t op;
    /// The root of broadcast, reduce, gather and scatter; -1 for the others.
    int32_t root;
    /// Elements of one part. Input and output of all-reduce, broadcast and reduce have one part each. All-gather
    /// and gather have one for each rank in the output, reduce-scatter and scatter in the input, and all-to-all in
    /// both.
    uint64_t count;
    /// Factor of inputs before they are summed, for `WARPLINK_REDUCE_OP_SCALED_SUM`; not read for others. In
    /// single precision, but for 64 bits.
    double factor;
} warplink_collective_call;

/// How a call is done; texts are never freed.
typedef struct {
    /// "direct" for kernels that store into memory of the peers, "engine" for the vendor's library.
    const char *path;
    /// The algorithm, such as "one-shot"; null where the library does the call. The other members are 0 then.
    const char *algorithm;
    /// Lanes that move data: groups of threads of the kernel.
    uint32_t lanes;
    /// Threads of each.
    uint32_t threads;
    /// Into how many chunks a lane cuts its data.
    uint64_t chunks;
} warplink_collective_choice;

/// A collective that is bound to its memory. Zero is none.
typedef struct {
    uint64_t id;
} warplink_bound_call;

/// A collective of rows and what follows it, the same on every rank but for the memory. Get one from
/// `warplink_fused_call_default`, and change what is to differ. With h the sum of all inputs and the residual, rounded to the
/// element type, and n what the norm makes of h, or h itself, q is n divided by a scale, as F8E4M3 or e2m1. What is stored are those
/// outputs that are not null, at least one. Memory is of the device, row by row, and stays allocated until the stream is done.
/// One of `sum`, `residual_out` and `output` may be exactly the input or the residual; other memory that is written overlaps
/// nothing.
typedef struct {
    /// Bytes of this struct, which tell the version of the header; as `warplink_fused_call_default` set it.
    size_t size;
    /// A `warplink_fused_kind`.
    int32_t kind;
    /// The type of everything but `quantized` and `scale`, a `warplink_element_type`: F32, F16 or BF16.
    int32_t element_type;
    /// A `warplink_norm`.
    int32_t norm;
    /// A `warplink_quantization`.
    int32_t quantization;
    /// A `warplink_wire`: what FP8 saves, and its error, stand in docs/fused.md.
    int32_t wire;
    /// Not 0 where 1 is added to the weight.
    int32_t weight_bias;
    /// Added to the mean of squares, or to the variance; not negative.
    float eps;
    /// How many rows, those of all ranks.
    uint64_t tokens;
    /// Elements of a row.
    uint64_t width;
    /// This rank's rows.
    const void *input;
    /// Rows that are added to the sum; null for none.
    const void *residual;
    /// `[width]`, exactly with a norm.
    const void *weight;
    /// `[width]`, added behind the weight; null for none.
    const void *bias;
    /// The sum alone.
    void *sum;
    /// h.
    void *residual_out;
    /// n.
    void *output;
    /// q, exactly with a quantisation; with `WARPLINK_QUANTIZATION_NVFP4` bytes of two elements each, `[rows, width / 2, rounded
    /// up]`.
    void *quantized;
    /// One float that is read, with `WARPLINK_QUANTIZATION_STATIC`; otherwise written: floats, `[rows]` or `[rows, width / 128,
    /// rounded up]`, and with `WARPLINK_QUANTIZATION_MXFP8` bytes, `[rows, width / 32, rounded up]`, or with
    /// `WARPLINK_QUANTIZATION_NVFP4` F8E4M3, `[rows, width / 16, rounded up]`.
    void *scale;
    /// One float that is read, exactly with `WARPLINK_QUANTIZATION_NVFP4`: what scales are multiplied by.
    const float *global_scale;
} warplink_fused_call;

/// A send or a receive of a group.
typedef struct {
    /// The rank at the other end; it may be this one.
    int32_t peer;
    /// A `warplink_direction`.
    int32_t direction;
    /// Data to send, which is only read, or memory for received data: an address of the device. May be null
    /// for no bytes.
    void *memory;
    /// Length in bytes.
    uint64_t bytes;
} warplink_message;

/// How memory is cut into a part for each rank, in elements.
typedef struct {
    /// How many elements the part of each rank has: one number for each rank.
    const uint64_t *counts;
    /// From which element on it lies, likewise; null where the parts lie one after the other.
    const uint64_t *displacements;
} warplink_parts;

/// A layer of experts; the same on every rank.
typedef struct {
    /// How many experts there are: a multiple of the ranks. Rank r has those from `r * experts / size` on.
    uint64_t experts;
    /// To how many experts a token goes.
    uint64_t top_k;
    /// The most tokens of a rank in one call.
    uint64_t max_tokens;
    /// The most rows that one rank sends to one other in a call; 0 for the most that there may be.
    uint64_t max_rows;
    /// Elements of a row.
    uint64_t elements;
    /// Their type, a `warplink_element_type`: F32, F16 or BF16.
    int32_t element_type;
} warplink_expert_options;

/// A layer of experts. Zero is none.
typedef struct {
    uint64_t id;
} warplink_experts;

/// Memory of the device for the rows that go to the experts of this rank, by the rank that they come from.
typedef struct {
    /// The rows: `[size, max_rows, elements]`, of which those of rank p are the first `counts[p]`, in the order of its
    /// tokens. `warplink_experts_max_rows` gives `max_rows`.
    void *rows;
    /// For each row, which of this rank's experts it is for, from 0 on: `[size, max_rows]`.
    int32_t *experts;
    /// How many rows came from each rank: `[size]`.
    int32_t *counts;
} warplink_dispatched;

/// Gets each message of the log: a `warplink_log_level`, one line without an end of line, valid during the call,
/// and the pointer that the handler was set with. It is called on any thread, by several at the same time. It
/// may call `warplink_default_log_handler`, other calls of Warplink are refused with WARPLINK_STATUS_INVALID_USAGE, and must
/// return: one that throws ends the process. In C++, declare it `noexcept`.
typedef void (*warplink_log_handler)(int32_t level, const char *message, void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// The version of the library that runs, as 10000 * major + 100 * minor + patch.
uint32_t warplink_version(void);

/// A few words on a status, of static lifetime; never null, also for a number that is no status.
const char *warplink_status_text(int32_t status);

/// The last error of the calling thread: what happened, to whom, what was expected, and what to do. Empty
/// where no call has failed; never null. Valid until the next call of the thread that fails.
const char *warplink_last_error(void);

/// The rank that the last error of the calling thread concerns, or -1 where there is none.
int32_t warplink_last_error_peer(void);

/// Options with which the environment and the library decide. Reads nothing and does not block.
warplink_options warplink_options_default(void);

/// Makes a unique id with a fresh secret, for ranks that meet at `ip` (of this machine; null is 127.0.0.1) and `port`.
/// With port 0 the system picks a free one, which this process holds until one of its ranks joins; if none will, call
/// `warplink_unique_id_release`. Does not block. An `ip` that is no address of one machine is
/// WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_unique_id_create(const char *ip,
                                          uint16_t port,
                                          warplink_unique_id *id);

/// Gives up the port that this process holds for the id, so that a rank in another process can listen there; does
/// nothing where it holds none. Does not block. Bytes that are no id are WARPLINK_STATUS_INVALID_HANDLE.
warplink_status warplink_unique_id_release(const warplink_unique_id *id);

/// Sets how long joining may take, in seconds, for the inits that follow in this process. Without it, WARPLINK_TIMEOUT
/// says, else 60 seconds. Does not block. Less than 1 is WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_set_bootstrap_timeout(int32_t seconds);

/// Joins as `rank` of `size` ranks that meet at `address`, as "ip:port" of rank 0. Blocks until all have joined.
/// Without a secret (`options`, WARPLINK_SECRET) it must be a loopback address. `options` may be null.
///
/// A rank that is not below `size`, and options of another version's header, are WARPLINK_STATUS_INVALID_ARGUMENT,
/// text that is no address or no device WARPLINK_STATUS_PARSE; ranks that are missing at the timeout
/// WARPLINK_STATUS_TIMEOUT, that have another size or another kind of device WARPLINK_STATUS_MISMATCH, and that hold
/// another secret WARPLINK_STATUS_AUTHENTICATION; an address that another process listens on
/// WARPLINK_STATUS_ADDRESS_IN_USE; a device that is not there WARPLINK_STATUS_DRIVER, WARPLINK_STATUS_LIBRARY_MISSING
/// or WARPLINK_STATUS_UNSUPPORTED.
warplink_status warplink_init(warplink_comm *comm,
                              int32_t size,
                              const char *address,
                              int32_t rank,
                              const warplink_options *options);

/// Joins as `rank` of `size` ranks that hold the same id. Blocks until all have joined. `options` may be null. Fails
/// as `warplink_init`; bytes that are no id are WARPLINK_STATUS_INVALID_HANDLE.
warplink_status warplink_init_from_id(warplink_comm *comm,
                                      int32_t size,
                                      const warplink_unique_id *id,
                                      int32_t rank,
                                      const warplink_options *options);

/// Joins as `warplink launch`, torchrun, mpirun or srun started this process. Blocks until all ranks have joined.
/// `options` may be null. Fails as `warplink_init`; variables that are missing are WARPLINK_STATUS_INVALID_ARGUMENT,
/// and those that are no numbers WARPLINK_STATUS_PARSE.
warplink_status warplink_init_from_env(warplink_comm *comm,
                                       const warplink_options *options);

/// This rank's number, from 0 on. Does not block.
warplink_status warplink_rank(warplink_comm comm, int32_t *rank);

/// How many ranks there are. Does not block.
warplink_status warplink_size(warplink_comm comm, int32_t *size);

/// Gathers `bytes` bytes of every rank, through the hosts: `data` has room for those of all ranks, in their order, and
/// this rank's in their place. Blocks until every rank has called it with the same length; another length is
/// WARPLINK_STATUS_MISMATCH on every rank, a rank that does not call it WARPLINK_STATUS_TIMEOUT.
warplink_status warplink_all_gather(warplink_comm comm,
                                    void *data,
                                    size_t bytes);

/// Blocks until every rank has called it. It orders hosts, not streams. A rank that does not call it is
/// WARPLINK_STATUS_TIMEOUT, one that is gone WARPLINK_STATUS_PEER_LOST or WARPLINK_STATUS_PEER_LEFT.
warplink_status warplink_barrier(warplink_comm comm);

/// Leaves in order. Blocks until every rank has called it, and until this rank's streams are done with what they use
/// of Warplink. From then on the communicator and all that was made with it (regions, streams, modules ...) cannot be
/// used, also if this fails; borrowed streams that record no graph are given back. A process that ends without it is
/// lost to its peers. A stream that still waits for a peer at the timeout, and a rank that does not call it, are
/// WARPLINK_STATUS_TIMEOUT, a rank that was lost WARPLINK_STATUS_PEER_LOST; this rank then leaves as by
/// `warplink_abort`.
warplink_status warplink_destroy(warplink_comm comm);

/// Leaves as a failure: the peers' waits, also those of kernels, end with an error that names this rank and `reason`,
/// and so do the waits in this rank's streams. Blocks for some two seconds at most. Later calls that concern other
/// ranks fail. The communicator still has to be destroyed, which then fails too. A second abort does nothing.
warplink_status warplink_abort(warplink_comm comm,
                               const char *reason);

/// Allocates `bytes` bytes of the device that peers may reach. The content is undefined. Blocks for moments, and where
/// memory is short for some two seconds, in which peers let go of what was freed; then it is
/// WARPLINK_STATUS_OUT_OF_MEMORY. No bytes are WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_alloc(warplink_comm comm,
                               size_t bytes,
                               warplink_region *region);

/// Registers `bytes` bytes at `address` that somebody else allocated (cudaMalloc, say). They must stay allocated until
/// `warplink_region_free` of the region has succeeded, or the communicator is destroyed. On the host device, they must
/// lie in memory that `warplink_alloc` gave. Does not block. A range that passes the end of an allocation is
/// WARPLINK_STATUS_INVALID_ARGUMENT, memory that cannot be shared WARPLINK_STATUS_UNSUPPORTED.
warplink_status warplink_register(warplink_comm comm,
                                  void *address,
                                  size_t bytes,
                                  warplink_region *region);

/// Gives a region back. Allocated memory is used again once no stream, connection or peer uses it any more; this does
/// not block. For registered memory, blocks until no peer maps it any more, after which its owner may free it; an
/// error where a connection of this rank has it (WARPLINK_STATUS_INVALID_ARGUMENT), another thread's call uses it
/// (WARPLINK_STATUS_INVALID_USAGE), or a peer does not let go in time (WARPLINK_STATUS_TIMEOUT): then it has to stay
/// allocated until the communicator is destroyed.
warplink_status warplink_region_free(warplink_region region);

/// The address of the region's first byte in this process, on its device. Does not block.
warplink_status warplink_region_address(warplink_region region, void **address);

/// The region's length in bytes. Does not block.
warplink_status warplink_region_bytes(warplink_region region, size_t *bytes);

/// Copies from host memory to the region's bytes, as many as the span has, and returns when that is done. Ordered
/// after nothing that is in a stream. Bytes past the end of the region are WARPLINK_STATUS_INVALID_ARGUMENT. Null is
/// allowed for no bytes.
warplink_status warplink_upload(warplink_span target,
                                const void *source);

/// Copies from the region's bytes, as many as the span has, to host memory, and returns when that is done. As
/// `warplink_upload` otherwise.
warplink_status warplink_download(void *target, warplink_span source);

/// Enqueues a copy between regions of this rank, of the same length. Does not block. Other lengths, and bytes past the
/// end of a region, are WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_copy(warplink_span target,
                              warplink_span source,
                              warplink_stream stream);

/// Makes a stream. Does not wait for other work of the device, but may block for moments.
warplink_status warplink_stream_create(warplink_comm comm, warplink_stream *stream);

/// Borrows a CUDA stream (a CUstream or cudaStream_t) of the rank's GPU, in its primary context. It must stay valid
/// until `warplink_stream_destroy`, which leaves it alone. Null is the legacy default stream. Does not block. The host
/// device has none: WARPLINK_STATUS_UNSUPPORTED.
warplink_status warplink_stream_borrow(warplink_comm comm,
                                       void *cuda_stream,
                                       warplink_stream *stream);

/// Gives a stream back, on any thread. What was enqueued is done all the same. Does not block. It is
/// WARPLINK_STATUS_INVALID_ARGUMENT while a borrowed stream records a graph, and leaves it borrowed.
warplink_status warplink_stream_destroy(warplink_stream stream);

/// The CUDA stream behind it, on a GPU; on the host device, a number that tells streams apart. Does not block.
warplink_status warplink_stream_raw(warplink_stream stream,
                                    void **raw);

/// Blocks until everything enqueued so far is done. Where work in the stream has failed, it gives that error; a rank
/// that was lost is WARPLINK_STATUS_PEER_LOST. It is WARPLINK_STATUS_TIMEOUT, and names the peer that the stream waits
/// for, where the timeout passes first.
warplink_status warplink_stream_synchronize(warplink_stream stream);

/// Holds the stream until the peer has signalled `epoch` times in all through the connection with that peer and tag.
/// Uses up no signal. Does not block the caller. A connection that was not declared is
/// WARPLINK_STATUS_INVALID_ARGUMENT, one that was not set up WARPLINK_STATUS_INVALID_USAGE.
warplink_status warplink_stream_wait(warplink_stream stream,
                                     warplink_comm comm,
                                     int32_t peer,
                                     uint64_t tag,
                                     uint64_t epoch);

/// Declares a connection to `peer`, which declares its end with the same tag and transport. `region` is this rank's
/// memory for it; the peer's may have another length. `transport` is a `warplink_transport`. `network_devices` names
/// the network devices of this rank to use, separated by commas and as UCX names them ("mlx5_0:1", "eth0"); null for
/// all of them, and with another transport than the network. Does not communicate, and does not block;
/// `warplink_setup` connects what was declared. A rank that is no peer, a peer and tag that were declared before, and
/// an unknown transport are WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_connect(warplink_comm comm,
                                 int32_t peer,
                                 uint64_t tag,
                                 warplink_region region,
                                 int32_t transport,
                                 const char *network_devices);

/// Connects everything that was declared since the last setup. Blocks until the peers have set up their ends; then
/// kernels of both may use the channels. It starts the proxy where a connection needs it. If it fails, what was
/// declared stays so, and it may be called again. May be called with nothing declared. A peer that does not set up its
/// end is WARPLINK_STATUS_TIMEOUT, one that named another transport WARPLINK_STATUS_MISMATCH on both ranks, a direct
/// one to another machine WARPLINK_STATUS_UNSUPPORTED, and a network without UCX WARPLINK_STATUS_LIBRARY_MISSING.
warplink_status warplink_setup(warplink_comm comm);

/// The channel of the connection to `peer` with `tag`, for a kernel that is launched by other means than
/// `warplink_launch`. It is valid until the communicator is destroyed. Does not block. A connection that was not
/// declared is WARPLINK_STATUS_INVALID_ARGUMENT, one that was not set up WARPLINK_STATUS_INVALID_USAGE.
warplink_status warplink_channel_get(warplink_comm comm,
                                     int32_t peer,
                                     uint64_t tag,
                                     warplink_channel *channel);

/// The channels of all connections, in the order in which they were declared. Writes up to `capacity` of them to
/// `channels`, which may be null where that is 0, and how many there are to `count`. Does not block. Before the first
/// setup it is WARPLINK_STATUS_INVALID_USAGE.
warplink_status warplink_channel_get_all(warplink_comm comm,
                                         warplink_channel *channels,
                                         size_t capacity,
                                         size_t *count);

/// Call it after launching kernels on `stream` that have channels, by other means than `warplink_launch`: what the
/// channels name is kept until the stream is past them, and the proxy looks for triggers at once. Does not block.
/// Before the first setup it is WARPLINK_STATUS_INVALID_USAGE; where the proxy has failed, it gives that error.
warplink_status warplink_launched(warplink_comm comm,
                                  warplink_stream stream);

/// Enqueues a copy of this rank's bytes to the peer's memory, from `target` on. Does not block. Nothing orders it with
/// what kernels do; signals of a kernel that follows on `stream` do. Bytes past the end of a region, and a connection
/// that was not declared, are WARPLINK_STATUS_INVALID_ARGUMENT, one that was not set up WARPLINK_STATUS_INVALID_USAGE.
/// Over the network, it is WARPLINK_STATUS_UNSUPPORTED while the stream records a graph, and WARPLINK_STATUS_CLOSED
/// where the proxy was stopped.
warplink_status warplink_write(warplink_comm comm,
                               int32_t peer,
                               uint64_t tag,
                               warplink_at target,
                               warplink_span source,
                               warplink_stream stream);

/// Enqueues a copy of the peer's memory, from `source` on, to this rank's bytes. Does not block; see `warplink_write`.
warplink_status warplink_read(warplink_comm comm,
                              int32_t peer,
                              uint64_t tag,
                              warplink_span target,
                              warplink_at source,
                              warplink_stream stream);

/// Launches the proxies again where `warplink_proxy_stop` stopped them, and has them look for triggers now.
/// `warplink_setup` started them, so otherwise this is only needed before a graph with proxied channels is launched, and
/// for programs ported from MSCCL++. No kernel may use proxied channels during a launch. Blocks while a kernel stores a
/// trigger that it began, for a second at most for each proxy; then it is WARPLINK_STATUS_TIMEOUT. Before the first setup
/// it is WARPLINK_STATUS_INVALID_USAGE; where the stop left requests undone, WARPLINK_STATUS_CLOSED; where a proxy
/// has failed, it gives that error.
warplink_status warplink_proxy_launch(warplink_comm comm);

/// Stops the proxy: it does what kernels have asked for, and ends. Blocks until then. Kernels that use proxied
/// channels later get the status `aborted`; direct channels go on. Does nothing where no proxy runs. Before the first
/// setup it is WARPLINK_STATUS_INVALID_USAGE, and WARPLINK_STATUS_TIMEOUT, with the number of triggers that were not
/// sent, where the timeout passes first.
warplink_status warplink_proxy_stop(warplink_comm comm);

/// Adds a region to all connections that were set up. Every peer calls this as well, with a region of its own and as
/// many times. Blocks until the peers have. Kernels then name it as `warplink::At(number, offset)`. Before the first
/// setup it is WARPLINK_STATUS_INVALID_USAGE, and WARPLINK_STATUS_TIMEOUT where a peer does not call it. A connection
/// has 16 regions at most.
warplink_status warplink_register_buffer(warplink_comm comm,
                                         warplink_region region,
                                         warplink_buffer *buffer);

/// The number by which kernels name the buffer on the connection to `peer` with `tag`. Does not block. A connection
/// that the buffer is not on is WARPLINK_STATUS_INVALID_ARGUMENT: only those have it that were set up before it was
/// registered.
warplink_status warplink_buffer_number(warplink_buffer buffer,
                                       int32_t peer,
                                       uint64_t tag,
                                       uint32_t *number);

/// Enqueues copies of this rank's bytes to the buffers of all peers, from `offset` bytes on; one copy for each
/// connection. Does not block, and orders nothing at the peers: signal them, or meet at a barrier after
/// `warplink_stream_synchronize`. Fails as `warplink_write`; copies to connections before the one that failed may have
/// been enqueued.
warplink_status warplink_registered_write(warplink_buffer buffer,
                                          uint64_t offset,
                                          warplink_span source,
                                          warplink_stream stream);

/// Gives the handle back. The region stays with the connections until the communicator is destroyed. Does not block.
warplink_status warplink_buffer_free(warplink_buffer buffer);

/// Loads code. On a GPU it compiles the text, unless the same was compiled before, and may block until running
/// kernels are done: so load modules, and get their kernels, before any kernel runs that waits for a peer. On the host
/// device, only the bodies are taken.
///
/// A source without code for the device is WARPLINK_STATUS_UNSUPPORTED, an image that is none or is cut off
/// WARPLINK_STATUS_INVALID_ARGUMENT on any device, text that does not compile and an image for another GPU
/// WARPLINK_STATUS_DRIVER, with the compiler's messages, and a missing NVRTC WARPLINK_STATUS_LIBRARY_MISSING.
///
/// That the kernels touch only what their arguments name is for the caller to see to.
warplink_status warplink_module_load(warplink_comm comm,
                                     const warplink_module_source *source,
                                     warplink_module *module);

/// Gives a module back. Its kernels stay. Does not block.
warplink_status warplink_module_free(warplink_module module);

/// The kernel `name` of a module, ready to be launched. On a GPU it may block as `warplink_module_load`. A name that
/// the module does not have is WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_kernel_get(warplink_module module,
                                    const char *name,
                                    warplink_kernel *kernel);

/// Gives a kernel back. Launches go on. Does not block.
warplink_status warplink_kernel_free(warplink_kernel kernel);

/// Enqueues a kernel on `stream`, with one argument for each of its parameters. Does not block. Regions among the
/// arguments must not be freed until it is done; memory behind channels is kept automatically. The stream fails when a
/// rank is lost that the kernel's channels lead to.
///
/// An empty shape, more blocks than there may be (256 on the host device), and, as far as the driver tells, arguments
/// that do not match the parameters are WARPLINK_STATUS_INVALID_ARGUMENT, channels before `warplink_setup`
/// WARPLINK_STATUS_INVALID_USAGE. What a kernel itself fails with, `warplink_stream_synchronize` gives.
warplink_status warplink_launch(warplink_kernel kernel,
                                warplink_stream stream,
                                warplink_shape shape,
                                const warplink_argument *arguments,
                                size_t count);

/// An argument: unsigned int.
warplink_argument warplink_argument_u32(uint32_t value);

/// An argument: int.
warplink_argument warplink_argument_i32(int32_t value);

/// An argument: unsigned long long.
warplink_argument warplink_argument_u64(uint64_t value);

/// An argument: long long.
warplink_argument warplink_argument_i64(int64_t value);

/// An argument: float.
warplink_argument warplink_argument_f32(float value);

/// An argument: double.
warplink_argument warplink_argument_f64(double value);

/// An argument: a pointer to the region's byte at `offset`.
warplink_argument warplink_argument_region(warplink_region region, uint64_t offset);

/// An argument: the channel to `peer` with `tag`, a `warplink::Channel` by value.
warplink_argument warplink_argument_channel(warplink_comm comm, int32_t peer, uint64_t tag);

/// An argument: the channels of all connections that were set up, in the order in which they were declared, a
/// `const warplink::Channel *`. A host kernel names one of them by `warplink_block_channel`. The first launch after a setup
/// copies them to the device, which blocks for moments; the copy stays until the communicator is destroyed, so that a
/// graph may have it.
warplink_argument warplink_argument_channels(warplink_comm comm);

/// In a host kernel: the block's number in the grid, from 0 on, and how many blocks there are. Each of the places may be
/// null. Does not block.
warplink_status warplink_block_index(uint32_t *index,
                                     uint32_t *blocks);

/// In a host kernel: how many threads a block of the launch would have on a GPU. The body runs on one. Does not block.
warplink_status warplink_block_threads(uint32_t *threads);

/// In a host kernel: the unsigned integer, of 32 or 64 bits, that is argument `argument` of the launch. Does not block.
warplink_status warplink_block_u64(uint32_t argument,
                                   uint64_t *value);

/// In a host kernel: the signed integer, of 32 or 64 bits, that is argument `argument` of the launch. Does not block.
warplink_status warplink_block_i64(uint32_t argument,
                                   int64_t *value);

/// In a host kernel: the float or double that is argument `argument` of the launch. Does not block.
warplink_status warplink_block_f64(uint32_t argument, double *value);

/// In a host kernel: copies `bytes` bytes to `target`, in memory of the program's, and returns when that is done. They
/// come from `source` in this rank's regions where `argument` is a channel, by either kind of number, and from byte
/// `source.offset` of the argument where that is a region. Bytes past the end are WARPLINK_STATUS_INVALID_ARGUMENT. Null
/// is allowed for no bytes.
warplink_status warplink_block_load(uint32_t argument,
                                    void *target,
                                    warplink_at source,
                                    size_t bytes);

/// In a host kernel: copies `bytes` bytes from `source`, in memory of the program's, to `argument`, and returns when that
/// is done; see `warplink_block_load`.
warplink_status warplink_block_store(uint32_t argument,
                                     warplink_at target,
                                     const void *source,
                                     size_t bytes);

/// In a host kernel: how many channels the array has that is argument `argument` (`warplink_argument_channels`). Does not
/// block.
warplink_status warplink_block_channels(uint32_t argument,
                                        uint32_t *count);

/// In a host kernel: the number by which the other calls take channel `index`, from 0 on, of the array that is argument
/// `argument`. It is good for all blocks of the launch. An index that the array does not have is
/// WARPLINK_STATUS_INVALID_ARGUMENT. Does not block.
warplink_status warplink_block_channel(uint32_t argument,
                                       uint32_t index,
                                       uint32_t *channel);

/// In a host kernel: the rank at the other end of a channel. Does not block.
warplink_status warplink_block_peer(uint32_t channel, int32_t *peer);

/// In a host kernel: copies `bytes` bytes from `source` in this rank's regions to `target` in the peer's. Does not wait for
/// the copy: the source may be overwritten after a flush, and the peer may read after a signal.
warplink_status warplink_block_put(uint32_t channel,
                                   warplink_at target,
                                   warplink_at source,
                                   uint64_t bytes);

/// In a host kernel: copies `bytes` bytes from `source` in the peer's regions to `target` in this rank's. Does not wait for
/// the copy: they may be read after a flush.
warplink_status warplink_block_get(uint32_t channel,
                                   warplink_at target,
                                   warplink_at source,
                                   uint64_t bytes);

/// In a host kernel: a put, and a signal after it. Does not wait for the copy.
warplink_status warplink_block_put_with_signal(uint32_t channel,
                                               warplink_at target,
                                               warplink_at source,
                                               uint64_t bytes);

/// In a host kernel: a put, a signal and a flush. Blocks until the source may be overwritten.
warplink_status warplink_block_put_with_signal_and_flush(uint32_t channel,
                                                         warplink_at target,
                                                         warplink_at source,
                                                         uint64_t bytes);

/// In a host kernel: counts up the peer's epoch by one, after everything that the block did before. Does not wait for the
/// peer.
warplink_status warplink_block_signal(uint32_t channel);

/// In a host kernel: blocks until what was put on this channel before may be overwritten, and what was got may be read.
warplink_status warplink_block_flush(uint32_t channel);

/// In a host kernel: blocks until the peer has signalled once more than was waited for.
warplink_status warplink_block_wait(uint32_t channel);

/// In a host kernel: blocks until the peer has signalled `epoch` times in all. Uses up no signal.
warplink_status warplink_block_wait_until(uint32_t channel, uint64_t epoch);

/// In a host kernel: as `warplink_block_wait`, where that would not block. Whether there was a signal to use up goes to
/// `arrived`, as 0 or 1.
warplink_status warplink_block_poll(uint32_t channel,
                                    int32_t *arrived);

/// In a host kernel: how often the peer has signalled so far, in all. Does not block.
warplink_status warplink_block_epoch(uint32_t channel, uint64_t *epoch);

/// In a host kernel: signals on each of `count` channels, then waits for a signal on each. Blocks until all peers have made
/// the call with their channels. A number among `channels` may also be that of an argument that is an array, which stands
/// for all channels in it. Null is allowed for none.
warplink_status warplink_block_barrier(const uint32_t *channels,
                                       size_t count);

/// In a host kernel: puts `bytes` bytes from `source` here to `target` at the peer as packets of 8 bytes, of which 4 are
/// data: they take 2 * `bytes` there. The flag differs from what was in that place before (count up, from 1). `bytes` and
/// the source's offset are multiples of 4, the target's of 8; others are WARPLINK_STATUS_INVALID_ARGUMENT. Needs a direct
/// channel, and is WARPLINK_STATUS_UNSUPPORTED on others. Does not wait for the peer.
warplink_status warplink_block_put_packets8(uint32_t channel,
                                            warplink_at target,
                                            warplink_at source,
                                            uint64_t bytes,
                                            uint32_t flag);

/// In a host kernel: reads `bytes` bytes that the peer put to `source` here as packets of 8 bytes with the same flag, to
/// `target` here. Blocks until they have come.
warplink_status warplink_block_read_packets8(uint32_t channel,
                                             warplink_at target,
                                             warplink_at source,
                                             uint64_t bytes,
                                             uint32_t flag);

/// In a host kernel: as `warplink_block_put_packets8`, as packets of 16 bytes, of which 8 are data: they take 2 * `bytes`.
/// `bytes` and the source's offset are multiples of 8, the target's of 16.
warplink_status warplink_block_put_packets16(uint32_t channel,
                                             warplink_at target,
                                             warplink_at source,
                                             uint64_t bytes,
                                             uint32_t flag);

/// In a host kernel: as `warplink_block_read_packets8`, of packets of 16 bytes.
warplink_status warplink_block_read_packets16(uint32_t channel,
                                              warplink_at target,
                                              warplink_at source,
                                              uint64_t bytes,
                                              uint32_t flag);

/// In a host kernel: as `warplink_block_put_packets8`, as packets of 128 bytes, of which 120 are data: they take 128 bytes
/// for every 120, and for what is left. `bytes` and the source's offset are multiples of 8, the target's of 128.
warplink_status warplink_block_put_packets128(uint32_t channel,
                                              warplink_at target,
                                              warplink_at source,
                                              uint64_t bytes,
                                              uint64_t flag);

/// In a host kernel: as `warplink_block_read_packets8`, of packets of 128 bytes.
warplink_status warplink_block_read_packets128(uint32_t channel,
                                               warplink_at target,
                                               warplink_at source,
                                               uint64_t bytes,
                                               uint64_t flag);

/// The options that the library chooses. Does not block.
warplink_collective_options warplink_collective_options_default(void);

/// Joins the collectives of all ranks, with a workspace of their own. Every rank calls it at the same time; blocks
/// until all have. Null options are the defaults. A rank that does not call it is WARPLINK_STATUS_TIMEOUT, options
/// that differ are WARPLINK_STATUS_MISMATCH, a rank that cannot join WARPLINK_STATUS_PEER_FAILED on the others, and
/// NCCL where it is needed and missing WARPLINK_STATUS_LIBRARY_MISSING.
warplink_status warplink_collectives_join(warplink_comm comm,
                                          const warplink_collective_options *options,
                                          warplink_collectives *collectives);

/// Gives collectives back. What was enqueued is done all the same. Does not block.
warplink_status warplink_collectives_free(warplink_collectives collectives);

/// The library's communicator (an ncclComm_t on GPUs) that calls go to; null where they do not go to the library. It
/// is valid until `warplink_collectives_free`, if no rank is lost. Does not block.
warplink_status warplink_collectives_communicator(warplink_collectives collectives,
                                                  void **communicator);

/// How a call would be done. Every rank gets the same. Does not block. Where the direct path does it and the options allow only an
/// algorithm that does not do this call, WARPLINK_STATUS_UNSUPPORTED.
warplink_status warplink_collectives_choice(warplink_collectives collectives,
                                            const warplink_collective_call *call,
                                            warplink_collective_choice *choice);

/// Path of `warplink_send_receive` and `warplink_all_to_all_v`: "direct" or "engine"; null where they do not reach
/// the other ranks. The text is never freed. Does not block.
warplink_status warplink_collectives_message_path(warplink_collectives collectives,
                                                  const char **path);

/// Enqueues a collective. `output` and `input` are addresses of the device, in any memory that stays allocated until
/// the stream is done; how long they are, `count` of the call says. They may be the same memory; for
/// all-gather and gather the input may be this rank's part of the output, for reduce-scatter and scatter the output its
/// part of the input. What a rank does not use may be null. Does not block. An unknown kind, type or operator, one that the
/// collective does not have, a root that is no rank, and null where memory is needed are WARPLINK_STATUS_INVALID_ARGUMENT.
/// Ranks that call different things get WARPLINK_STATUS_MISMATCH of `warplink_stream_synchronize`.
warplink_status warplink_collective(warplink_collectives collectives,
                                    const warplink_collective_call *call,
                                    void *output,
                                    const void *input,
                                    warplink_stream stream);

/// Binds a call to memory, for calls that are made again and again on the same, so that the copy engine can do large
/// all-gathers and all-to-alls. Arguments are those of `warplink_collective`. Peers may have the memory mapped: it stays allocated
/// until all ranks have called `warplink_bound_call_free` and the streams of the calls are done. Every rank binds the same
/// call at the same time; blocks until all have. Ranks that bind different calls are WARPLINK_STATUS_MISMATCH. Where a rank
/// does not bind, or has arguments that are refused, the others get WARPLINK_STATUS_TIMEOUT or WARPLINK_STATUS_PEER_FAILED.
warplink_status warplink_bind_collective(warplink_collectives collectives,
                                         const warplink_collective_call *call,
                                         void *output,
                                         const void *input,
                                         warplink_bound_call *bound);

/// Enqueues a bound call once. It counts as a call of its collectives, which all ranks make in the same order. Does not block.
/// Errors are those of `warplink_collective`.
warplink_status warplink_bound_call_enqueue(warplink_bound_call bound,
                                            warplink_stream stream);

/// How a bound call is done; "copy-engine" is the algorithm where the copy engine does it. Does not block.
warplink_status warplink_bound_call_choice(warplink_bound_call bound, warplink_collective_choice *choice);

/// Gives a bound call back. What was enqueued is done all the same. Does not block.
warplink_status warplink_bound_call_free(warplink_bound_call bound);

/// An all-reduce without memory, norm or quantisation. Does not block.
warplink_fused_call warplink_fused_call_default(void);

/// Enqueues a collective of rows with what follows it, as one kernel. All ranks get the same bits. It needs the direct path:
/// WARPLINK_STATUS_UNSUPPORTED is the path by the vendor's library, and a row that is too long for the workspace. A description
/// that does not fit itself or its memory, and one of another version's header, are WARPLINK_STATUS_INVALID_ARGUMENT.
/// Ranks that call different things get WARPLINK_STATUS_MISMATCH of `warplink_stream_synchronize`. Does not block.
warplink_status warplink_fused_collective(warplink_collectives collectives,
                                          const warplink_fused_call *call,
                                          warplink_stream stream);

/// Does all `messages` at the same time, on any memory of the device that stays allocated until the stream is done. The
/// n-th send to a rank is for the n-th receive there from this one, of as many bytes. Only the two ranks of a message
/// call, and may group their messages differently, as long as some order of them lets all go on; messages to this rank
/// itself have both ends in one group. What is received overlaps no other memory of the group. A group has 64
/// messages at most. Does not block. Ends of other lengths are WARPLINK_STATUS_MISMATCH of
/// `warplink_stream_synchronize` on both ranks, where the direct path does it.
warplink_status warplink_send_receive(warplink_collectives collectives,
                                      const warplink_message *messages,
                                      size_t count,
                                      warplink_stream stream);

/// Part p of `output` becomes this rank's part of rank p's `input`, for each rank, of a length of its own. Counts are in
/// elements of a `warplink_element_type`; what this rank sends to another has as many as that one expects. Parts of the
/// input may overlap, those of the output may not. Memory of no elements may be null. Every rank calls it, as any
/// collective; does not block, and fails as `warplink_send_receive` does.
warplink_status warplink_all_to_all_v(warplink_collectives collectives,
                                      int32_t element_type,
                                      void *output,
                                      warplink_parts output_parts,
                                      const void *input,
                                      warplink_parts input_parts,
                                      warplink_stream stream);

/// As `warplink_all_to_all_v`, where only device memory has the counts: `sent` says how many elements go to each rank, and
/// `received` becomes how many came from each, one of 64 bits for each rank. `max_count` limits each of them and is the
/// same on all ranks; the part of rank p begins at element p * max_count of `output` and `input`, which have that much
/// room for each rank. What is beyond the count is left alone. Nothing overlaps what is written. A graph serves all
/// counts up to the limit. Every rank calls it; does not block.
///
/// A count above the limit, and another limit or element size at the other end, are WARPLINK_STATUS_MISMATCH of
/// `warplink_stream_synchronize` on both ranks. WARPLINK_STATUS_UNSUPPORTED where the direct path does not send messages
/// (`warplink_collectives_message_path`).
warplink_status warplink_all_to_all_v_on_device(warplink_collectives collectives,
                                                int32_t element_type,
                                                void *output,
                                                uint64_t *received,
                                                const void *input,
                                                const uint64_t *sent,
                                                uint64_t max_count,
                                                warplink_stream stream);

/// Makes a layer of experts, with memory for its calls. Asks no other rank; blocks while kernels are compiled, the first
/// time on a machine. It needs the direct path. Calls of one layer follow one another; for those that are under way at
/// the same time, make several. Options that do not fit together are WARPLINK_STATUS_INVALID_ARGUMENT, and
/// WARPLINK_STATUS_UNSUPPORTED is the path by the vendor's library.
warplink_status warplink_experts_create(warplink_collectives collectives,
                                        const warplink_expert_options *options,
                                        warplink_experts *experts);

/// Gives a layer back. What was enqueued is done all the same. Does not block.
warplink_status warplink_experts_free(warplink_experts experts);

/// The most rows that one rank sends to one other in a call. Does not block.
warplink_status warplink_experts_max_rows(warplink_experts experts, uint64_t *max_rows);

/// Sends each of `count` rows of `tokens` (`[count, elements]`) to the ranks of its experts, whose numbers are in
/// `numbers` (`[count, top_k]`), once for each expert. A number that is no expert's, such as -1, is a slot without one.
/// All memory is of the device, and stays allocated until the stream is done. Every rank calls it, with any count up to
/// `max_tokens`, also 0, for which tokens and numbers may be null. Does not block. More rows for a rank than `max_rows`,
/// and ranks with other options, are WARPLINK_STATUS_MISMATCH of `warplink_stream_synchronize` on both ranks, and
/// none of these rows arrive.
warplink_status warplink_experts_dispatch(warplink_experts experts,
                                          const void *tokens,
                                          const int32_t *numbers,
                                          uint64_t count,
                                          const warplink_dispatched *target,
                                          warplink_stream stream);

/// `output` (`[count, elements]`) becomes for each token of the last dispatch the sum of its rows, each times its weight
/// in `weights` (`[count, top_k]`): in `float`, in the order of the slots, rounded once. `source` is what the dispatch
/// gave, with the experts' results in the place of the rows. A token without an expert gets zeros. Every rank calls it.
/// Does not block. Another `count` than the last dispatch had, or no dispatch before, is WARPLINK_STATUS_INVALID_ARGUMENT.
warplink_status warplink_experts_combine(warplink_experts experts,
                                         void *output,
                                         const warplink_dispatched *source,
                                         const float *weights,
                                         uint64_t count,
                                         warplink_stream stream);

/// Sets what gets the messages of the log, and the pointer that is passed to it. Null brings back the default handler.
/// Blocks while the previous handler runs on any thread: when this returns, it does so no more. WARPLINK_LOG sets the
/// level: "error", "warn" (the default), "info", "debug", "trace", or a filter of the `tracing` crates. It is
/// WARPLINK_STATUS_INVALID_USAGE where another library of the process has started a log by `tracing` before.
warplink_status warplink_set_log_handler(warplink_log_handler handler,
                                         void *user);

/// The handler that writes to standard error, where no other is set. `user` is ignored. A message that is null is
/// dropped.
void warplink_default_log_handler(int32_t level,
                                  const char *message,
                                  void *user);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WARPLINK_H */
