// Warplink for C and C++: one-sided communication between GPUs. docs/c.md explains it.
//
// Generated from the sources of crates/warplink-c by cbindgen; a test keeps it up to date.
//
// # Errors
// Every function that can fail returns a warplink_status. warplink_last_error returns what happened, to whom, what was
// expected and what to do, for the calling thread. No function throws, and none ends the process.
//
// The documentation of a function lists its specific errors. Common to all functions: WARPLINK_STATUS_INVALID_ARGUMENT
// for null pointers where the documentation does not allow them, handles that never existed, and handles of different
// communicators in one call; WARPLINK_STATUS_INVALID_USAGE for calls in the wrong order; WARPLINK_STATUS_PEER_LOST for
// calls that involve a lost rank; WARPLINK_STATUS_DRIVER if a driver call fails.
//
// User callbacks, which are log handlers and bodies of host kernels, must return: an exception that leaves one, or a
// thread that exits in one, terminates the process with a message. In C++, declare them noexcept.
//
// # Handles
// Communicators, regions, streams, buffers, modules, kernels, collectives, bound calls and layers of experts are
// numbers, passed by value. Zero is invalid. Calls with a handle that was freed, or whose communicator was destroyed,
// return WARPLINK_STATUS_CLOSED for the rest of the process's lifetime.
//
// # Pointers
// A pointer must be null or point to an object as required by its type and the function's documentation; null is
// rejected where the documentation does not allow it. Outputs are written only if a call succeeds. Pointers are not
// retained, except for the user pointers of host kernels and of the log handler, and registered memory. Text is UTF-8.
//
// # Threads
// Every function may be called on any thread and concurrently, even with the same handle. An object that one thread
// frees or destroys while another thread's call uses it stays alive until that call returns. Set up a communicator's
// connections and register its buffers on one thread at a time, as peers are matched by the order of the calls. A child
// process that was forked after the first call may not call anything.
//
// # Blocking
// The documentation of a function states whether it waits for other ranks. Such waits end at the timeout
// (warplink_options), and within seconds of the loss of a rank, with an error that names it. Work enqueued on a stream
// is executed later, in call order.
//
// # Host kernels
// The warplink_block_... calls may only be made by bodies of host-device kernels, on the thread that runs the body;
// elsewhere they return WARPLINK_STATUS_INVALID_USAGE. `argument` is the index of an argument of the launch, from 0.
// `channel` is the index of an argument created by warplink_argument_channel, or a number returned by
// warplink_block_channel for an element of a channel array. If an argument does not exist or has another kind, or a
// range passes the end of a region, calls return WARPLINK_STATUS_INVALID_ARGUMENT and do nothing. The channel calls
// correspond to the methods of warplink::Channel in warplink/device.cuh, called by a whole block. Offsets and lengths
// are in bytes. A call fails if a rank was lost, if this rank has failed and, on a proxied channel, if the proxy was
// stopped; a call that is blocked then returns.


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

/// Result of a function. `warplink_last_error` returns the details.
typedef enum {
    /// The call succeeded.
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

/// Transport of a connection; the same on both ranks.
typedef enum {
    /// Selected by the peer's location: direct if its memory can be mapped, the network if it is on another
    /// machine.
    WARPLINK_TRANSPORT_AUTO = 0,
    /// The kernel itself stores to and loads from the peer's mapped memory. The device must support atomic
    /// operations on that memory, as GPUs do over NVLink.
    WARPLINK_TRANSPORT_DIRECT = 1,
    /// A host thread (proxy) moves the bytes with the device's copy engine on request of kernels: to the
    /// peer's memory, or through host memory that both devices map, if they cannot map each other's.
    WARPLINK_TRANSPORT_PROXIED = 2,
    /// A host thread (proxy) sends the bytes over the network (UCX) on request of kernels: to ranks of other
    /// machines, or of this one if requested.
    WARPLINK_TRANSPORT_NETWORK = 3,
} warplink_transport;

/// Severity of a message.
typedef enum {
    /// Something failed.
    WARPLINK_LOG_LEVEL_ERROR = 1,
    /// Something unexpected that the library can handle.
    WARPLINK_LOG_LEVEL_WARN = 2,
    /// Normal progress.
    WARPLINK_LOG_LEVEL_INFO = 3,
    /// Details.
    WARPLINK_LOG_LEVEL_DEBUG = 4,
    /// All details.
    WARPLINK_LOG_LEVEL_TRACE = 5,
} warplink_log_level;

/// Kind of a collective.
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

/// Type of elements.
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

/// Operator of a reduction.
typedef enum {
    /// No reduction.
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

/// Direction of a message.
typedef enum {
    /// From this rank to the peer.
    WARPLINK_DIRECTION_SEND = 0,
    /// From the peer to this rank.
    WARPLINK_DIRECTION_RECEIVE = 1,
} warplink_direction;

/// Distribution of the rows of a fused collective over ranks. Where ranks own rows, each owns the same number, in rank order.
typedef enum {
    /// Every tensor has all rows on every rank.
    WARPLINK_FUSED_KIND_ALL_REDUCE = 0,
    /// The same, but the residual, the sum and `residual_out` have only the rows that the rank owns.
    WARPLINK_FUSED_KIND_ALL_REDUCE_SHARDED = 1,
    /// The input has all rows, everything else only the rows that the rank owns.
    WARPLINK_FUSED_KIND_REDUCE_SCATTER = 2,
    /// Only the residual is added, inputs are not summed: the input, the residual, the sum and `residual_out`
    /// have only the rows that the rank owns, the others all rows.
    WARPLINK_FUSED_KIND_ALL_GATHER = 3,
} warplink_fused_kind;

/// Normalisation of rows.
typedef enum {
    /// No normalisation.
    WARPLINK_NORM_NONE = 0,
    /// By the root of the mean of squares.
    WARPLINK_NORM_RMS = 1,
    /// By mean and variance.
    WARPLINK_NORM_LAYER = 2,
} warplink_norm;

/// Quantisation of rows. Computed scales are at least 1e-10.
typedef enum {
    /// No quantisation.
    WARPLINK_QUANTIZATION_NONE = 0,
    /// Divided by a given scale, one `f32`.
    WARPLINK_QUANTIZATION_STATIC = 1,
    /// Divided by a scale per row, which is an output: the row's largest magnitude / 448.
    WARPLINK_QUANTIZATION_PER_TOKEN = 2,
    /// The same for each block of 128 elements; the last block of a row may be shorter.
    WARPLINK_QUANTIZATION_PER_BLOCK = 3,
    /// The same for blocks, with the scale rounded up to a power of two.
    WARPLINK_QUANTIZATION_PER_BLOCK_POWER_OF_TWO = 4,
    /// Mxfp8: divided by a scale for each 32 elements: their largest magnitude / 448, rounded up to a power
    /// of two, which is stored as a byte, the power's exponent plus 127 (e8m0). At least 2⁻¹²⁶.
    WARPLINK_QUANTIZATION_MXFP8 = 5,
    /// Nvfp4: 4-bit floats (e2m1), two in a byte, the first in its low bits. Each 16 elements have a scale,
    /// as e4m3, row by row: their largest magnitude / 6, times a given global scale, one `f32`, positive and
    /// from 1e-30 to 1e30, usually 448 · 6 / the largest magnitude of all. So an element is about its float
    /// · its scale / the global one. Infinities and values out of range become 6; a block with a NaN has NaN
    /// for its scale.
    WARPLINK_QUANTIZATION_NVFP4 = 6,
} warplink_quantization;

/// Order of the rows that a rank receives for its experts.
typedef enum {
    /// By source rank: for each expert of a token one row, in the order of the tokens.
    WARPLINK_ROW_LAYOUT_BY_SOURCE = 0,
    /// By local expert, contiguous, as a grouped matmul reads them: for each expert of a token one row, an
    /// expert's rows by source rank and in the order of the tokens.
    WARPLINK_ROW_LAYOUT_BY_EXPERT = 1,
    /// By source rank: one row for each token, however many of this rank's experts it has.
    WARPLINK_ROW_LAYOUT_ONCE_PER_RANK = 2,
} warplink_row_layout;

/// Treatment of rows from one rank to another beyond the maximum of a layer of experts.
typedef enum {
    /// They are dropped and counted: those of the last tokens.
    WARPLINK_OVERFLOW_DROP = 0,
    /// The call fails, and ends the communicator.
    WARPLINK_OVERFLOW_FAIL = 1,
} warplink_overflow;

/// Wire format of the rows of a fused collective. All ranks get bit-identical results with either.
typedef enum {
    /// No rounding beyond that of the call itself.
    WARPLINK_WIRE_EXACT = 0,
    /// 8-bit floats (e4m3), and a scale for each block of 128 elements: half the bytes of 16-bit floats, for
    /// an error stated in docs/fused.md.
    WARPLINK_WIRE_FP8 = 1,
} warplink_wire;

/// Options for joining. Start from `warplink_options_default` and change members as needed.
typedef struct {
    /// Bytes of this struct, which identify the version of the header; set by `warplink_options_default`.
    size_t size;
    /// "host" or "cuda". Null: the value of WARPLINK_DEVICE if set, else a GPU if there is one.
    const char *device;
    /// Index of the GPU among those visible to the process. -1: the one of the local rank, or the only one.
    int32_t ordinal;
    /// Index among the ranks on this machine. -1: the value of WARPLINK_LOCAL_RANK if set, else the rank.
    int32_t local_rank;
    /// The secret that authenticates ranks of a job whose ranks meet at an address; the same on every rank, long and
    /// random. Null: WARPLINK_SECRET. A unique id contains its own secret.
    const char *secret;
    /// Timeout of every wait on the host after joining, in seconds. 0: WARPLINK_TIMEOUT if set, else 60. Joining uses
    /// the timeout set by `warplink_set_bootstrap_timeout`.
    double timeout;
} warplink_options;

/// Rendezvous of the ranks of a job: an address and the secret that authenticates ranks. A process that holds it can
/// join, so treat it as a password. Plain bytes: distribute it to the other ranks by any means.
typedef struct {
    /// Private to the library.
    uint8_t bytes[128];
} warplink_unique_id;

/// A communicator: this rank among the others. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_comm;

/// Memory of this rank that peers may access. Zero is invalid.
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

/// An ordered queue of device work. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_stream;

/// A channel as passed to kernels: the same bytes as `warplink::Channel` in `warplink/device.cuh`. Pass it by value to
/// a kernel launched by other means than `warplink_launch`. `peer` and `tag` identify the connection; the other members
/// are private to the library.
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

/// A position in one of a connection's regions.
typedef struct {
    /// 0 is the region that the connection was declared with; registered buffers follow.
    uint32_t region;
    /// Bytes from its start.
    uint64_t offset;
} warplink_at;

/// A region added to all connections. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_buffer;

/// The body of a kernel for the host device: called once for each block of a launch, concurrently; it uses the
/// `warplink_block_...` calls. It returns `WARPLINK_STATUS_SUCCESS` or the status of a failed call; in the latter case
/// the kernel's stream fails with that call's error. Other calls of Warplink fail with WARPLINK_STATUS_INVALID_USAGE.
/// It must return: one that throws terminates the process. In C++, declare it `noexcept`.
typedef int32_t (*warplink_host_kernel_body)(void *user);

/// A kernel for the host device.
typedef struct {
    /// The name of the kernel, the same as in CUDA C++.
    const char *name;
    /// The body.
    warplink_host_kernel_body body;
    /// Passed to the body; must stay valid as long as the module and its kernels. Blocks use it concurrently.
    void *user;
} warplink_host_kernel;

/// Contents of a module: CUDA C++ or machine code for GPUs, bodies for the host device, or both. Set unused members to
/// zero.
typedef struct {
    /// Name of the module, for error messages.
    const char *name;
    /// CUDA C++, compiled by NVRTC for the present GPU; kernels are extern "C". It may include `<warplink/device.cuh>`,
    /// which is always on the include path.
    const char *cuda;
    /// Alternatively, code for the present GPU built by nvcc: the contents of a complete cubin, fat binary or PTX file.
    const void *image;
    /// Length of `image` in bytes.
    size_t image_bytes;
    /// Options for NVRTC, such as "-DBLOCK=256".
    const char *const *options;
    /// Number of options.
    size_t option_count;
    /// Kernels for the host device.
    const warplink_host_kernel *host_kernels;
    /// Number of host kernels.
    size_t host_kernel_count;
} warplink_module_source;

/// Code loaded into the device. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_module;

/// A kernel of a module. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_kernel;

/// The shape of a launch: a one-dimensional grid of one-dimensional blocks.
typedef struct {
    /// Number of blocks. On the host device, the body is called for each.
    uint32_t blocks;
    /// Threads per block.
    uint32_t threads;
    /// Bytes of dynamic shared memory per block.
    uint32_t shared_bytes;
    /// Nonzero for a cooperative launch: all blocks are resident on the device at the same time, so that they may wait
    /// for one another.
    uint32_t together;
} warplink_shape;

/// The value of a kernel parameter, created by `warplink_argument_...`. Its members are private to the library.
typedef struct {
    uint32_t kind;
    int32_t peer;
    uint64_t handle;
    uint64_t value;
} warplink_argument;

/// Options of a group of collectives; the same on every rank but for `communicator`. Start from
/// `warplink_collective_options_default`.
typedef struct {
    /// Bytes of each rank's workspace.
    size_t workspace_bytes;
    /// "direct" for kernels that store into peer memory, "engine" for the vendor's library (NCCL on GPUs); null for the
    /// direct path wherever it is available.
    const char *path;
    /// An ncclComm_t of the same ranks in the same order, for calls that go to the vendor's library; null to have one
    /// created. The caller keeps ownership: it is neither destroyed nor aborted here, and the caller must do neither
    /// until `warplink_collectives_free` was called and the streams of its calls are synchronized. No other thread may
    /// use it while a collective is enqueued.
    void *communicator;
    /// The only algorithm allowed on the direct path, such as "one-shot"; null to select one for each call.
    /// docs/collectives.md lists them.
    const char *algorithm;
    /// The most multiprocessors that a call uses on the direct path, at least 2; 0 for the smallest number that reaches
    /// full speed.
    uint32_t multiprocessors;
} warplink_collective_options;

/// A group of collectives over all ranks. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_collectives;

/// A collective call, the same on every rank.
typedef struct {
    /// A `warplink_collective_kind`.
    int32_t kind;
    /// A `warplink_element_type`.
    int32_t element_type;
    /// A `warplink_reduce_op`; `WARPLINK_REDUCE_OP_NONE` for collectives without reduction.
    int32_t op;
    /// The root of broadcast, reduce, gather and scatter; -1 for the others.
    int32_t root;
    /// Elements of one part. Input and output of all-reduce, broadcast and reduce have one part each. The output of
    /// all-gather and gather, the input of reduce-scatter and scatter, and both of all-to-all have one part per rank.
    uint64_t count;
    /// Factor applied to inputs before they are summed, for `WARPLINK_REDUCE_OP_SCALED_SUM`; ignored for other
    /// operators. Single precision, except for 64-bit types.
    double factor;
} warplink_collective_call;

/// How a call is performed; strings are static and never freed.
typedef struct {
    /// "direct" for kernels that store into peer memory, "engine" for the vendor's library.
    const char *path;
    /// The algorithm, such as "one-shot"; null if the vendor's library performs the call. The other members are 0 then.
    const char *algorithm;
    /// Lanes that move data: groups of threads of the kernel.
    uint32_t lanes;
    /// Threads of each lane.
    uint32_t threads;
    /// The number of chunks into which a lane splits its data.
    uint64_t chunks;
} warplink_collective_choice;

/// A collective bound to fixed memory. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_bound_call;

/// A collective of rows and the operations fused with it, the same on every rank but for the memory. Start from
/// `warplink_fused_call_default` and change members as needed. Let h be the sum of all inputs and the residual, rounded
/// to the element type; n the result of the norm of h, or h itself; and q n divided by a scale, as F8E4M3 or e2m1. The
/// outputs that are not null are stored, at least one. All memory is device memory, contiguous by rows, and stays
/// allocated until the stream is synchronized. One of `sum`, `residual_out` and `output` may be exactly the input or
/// the residual; otherwise memory that is written overlaps nothing.
typedef struct {
    /// Bytes of this struct, which identify the version of the header; set by `warplink_fused_call_default`.
    size_t size;
    /// A `warplink_fused_kind`.
    int32_t kind;
    /// The type of everything but `quantized` and `scale`, a `warplink_element_type`: F32, F16 or BF16.
    int32_t element_type;
    /// A `warplink_norm`.
    int32_t norm;
    /// A `warplink_quantization`.
    int32_t quantization;
    /// A `warplink_wire`: docs/fused.md documents the savings and the error of FP8.
    int32_t wire;
    /// Nonzero to add 1 to the weight.
    int32_t weight_bias;
    /// Added to the mean of squares, or to the variance; not negative.
    float eps;
    /// Number of rows over all ranks.
    uint64_t tokens;
    /// Elements of a row.
    uint64_t width;
    /// This rank's rows.
    const void *input;
    /// Rows added to the sum; null for none.
    const void *residual;
    /// `[width]`; required with a norm and null otherwise.
    const void *weight;
    /// `[width]`, added after multiplication by the weight; null for none.
    const void *bias;
    /// The sum alone.
    void *sum;
    /// h.
    void *residual_out;
    /// n.
    void *output;
    /// q; required with a quantisation and null otherwise. With `WARPLINK_QUANTIZATION_NVFP4`, bytes of two elements
    /// each, `[rows, width / 2, rounded up]`.
    void *quantized;
    /// With `WARPLINK_QUANTIZATION_STATIC`, one float that is read. Otherwise written: floats, `[rows]` or `[rows,
    /// width / 128, rounded up]`; with `WARPLINK_QUANTIZATION_MXFP8` bytes, `[rows, width / 32, rounded up]`; with
    /// `WARPLINK_QUANTIZATION_NVFP4` F8E4M3, `[rows, width / 16, rounded up]`.
    void *scale;
    /// One float that is read, the factor applied to scales; required with `WARPLINK_QUANTIZATION_NVFP4` and null
    /// otherwise.
    const float *global_scale;
} warplink_fused_call;

/// A send or a receive of a group.
typedef struct {
    /// The rank at the other end; it may be this rank.
    int32_t peer;
    /// A `warplink_direction`.
    int32_t direction;
    /// Data to send, which is only read, or memory for received data: a device address. May be null if `bytes` is 0.
    void *memory;
    /// Length in bytes.
    uint64_t bytes;
} warplink_message;

/// Partition of memory into one part per rank, in elements.
typedef struct {
    /// Number of elements of each rank's part: one number per rank.
    const uint64_t *counts;
    /// Offset of each rank's part in elements: one number per rank; null if the parts are contiguous.
    const uint64_t *displacements;
} warplink_parts;

/// Options of a layer of experts; the same on every rank.
typedef struct {
    /// The number of experts, a multiple of the number of ranks. Rank r owns `experts / size` of them, starting at
    /// expert `r * experts / size`.
    uint64_t experts;
    /// The number of experts per token.
    uint64_t top_k;
    /// The most tokens per rank in one call.
    uint64_t max_tokens;
    /// The most rows that one rank sends to one other rank in a call; 0 for the upper bound that follows from the other
    /// options, which every routing fits.
    uint64_t max_rows;
    /// Elements of a row.
    uint64_t elements;
    /// Element type of the experts' results, and of tokens that are not quantised, a `warplink_element_type`: F32, F16 or
    /// BF16.
    int32_t element_type;
    /// Order of the received rows, a `warplink_row_layout`; 0 is by source rank.
    int32_t layout;
    /// Treatment of rows beyond `max_rows`, a `warplink_overflow`; 0 drops them.
    int32_t overflow;
    /// How rows are quantised, a `warplink_quantization`: none (0), PER_TOKEN, PER_BLOCK or PER_BLOCK_POWER_OF_TWO.
    int32_t quantization;
    /// Not 0 if tokens arrive quantised.
    int32_t quantized_tokens;
} warplink_expert_options;

/// A layer of experts. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_experts;

/// Tokens that a rank dispatches; device memory, which may be null if `count` is 0.
typedef struct {
    /// Their rows: `[count, elements]`.
    const void *rows;
    /// The numbers of their experts: `[count, top_k]`. A number that is no expert, such as -1, marks an unused slot.
    const int32_t *numbers;
    /// If they arrive quantised, their scales: `[count, scales]`, else null.
    const float *scales;
    /// With the layout ONCE_PER_RANK, the weights of their experts: `[count, top_k]`, else null.
    const float *weights;
    /// The number of tokens, up to `max_tokens`.
    uint64_t count;
} warplink_tokens;

/// Device memory for the rows sent to the experts of this rank. Shapes are those of the layouts by source rank; by expert,
/// the first two dimensions are one, in which the rows of one expert follow those of the one before.
typedef struct {
    /// The rows: `[size, max_rows, elements]`. The first `counts[p]` rows of part p come from rank p, in the order of
    /// its tokens. `warplink_experts_max_rows` returns `max_rows`.
    void *rows;
    /// For each row, the index of its expert among this rank's experts, from 0: `[size, max_rows]`. With the layout
    /// ONCE_PER_RANK of the expert in each slot, -1 for other ranks' and unused slots: `[size, max_rows, top_k]`.
    int32_t *experts;
    /// The number of rows received from each rank: `[size]`. By expert, of each of this rank's experts: `[experts / size]`.
    int32_t *counts;
    /// With a quantisation, the scales of rows: `[size, max_rows, scales]`, one for each row or 128 elements. Else null.
    float *scales;
    /// With the layout ONCE_PER_RANK, the weights of a row's token: `[size, max_rows, top_k]`. Else null.
    float *weights;
    /// With the overflow DROP, how many rows of this rank's tokens were dropped for each of all experts: `[experts]`. May be
    /// null, and is with FAIL.
    int32_t *dropped;
} warplink_dispatched;

/// Where the rows of a dispatch are. Zero is invalid.
typedef struct {
    uint64_t id;
} warplink_routing;

/// Receives each log message: a `warplink_log_level`, one line without a line terminator, valid during the call, and
/// the pointer passed to `warplink_set_log_handler`. It may be called on any thread and concurrently. It may call
/// `warplink_default_log_handler`; other calls of Warplink fail with WARPLINK_STATUS_INVALID_USAGE. It must return: one
/// that throws terminates the process. In C++, declare it `noexcept`.
typedef void (*warplink_log_handler)(int32_t level, const char *message, void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// The version of the loaded library, as 10000 * major + 100 * minor + patch.
uint32_t warplink_version(void);

/// A short description of a status, a static string; never null, even for a number that is no status.
const char *warplink_status_text(int32_t status);

/// The last error of the calling thread: what happened, to whom, what was expected, and what to do. Empty if no call
/// has failed; never null. Valid until the next call of the thread that fails.
const char *warplink_last_error(void);

/// The rank that the last error of the calling thread concerns, or -1 where there is none.
int32_t warplink_last_error_peer(void);

/// Options that leave all decisions to the environment and the library. Reads no environment variable and does not
/// block.
warplink_options warplink_options_default(void);

/// Creates a unique id with a fresh secret, for ranks that meet at `ip` (an address of this machine; null is 127.0.0.1)
/// and `port`. With port 0 the system picks a free port, which this process reserves until one of its ranks joins; if
/// none will, call `warplink_unique_id_release`. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if `ip` is
/// not the address of a single machine.
warplink_status warplink_unique_id_create(const char *ip,
                                          uint16_t port,
                                          warplink_unique_id *id);

/// Releases the port that this process reserved for the id, so that a rank in another process can listen on it; does
/// nothing if it holds none. Does not block. Returns WARPLINK_STATUS_INVALID_HANDLE for bytes that are no id.
warplink_status warplink_unique_id_release(const warplink_unique_id *id);

/// Sets the timeout of joining, in seconds, for subsequent inits in this process. The default is WARPLINK_TIMEOUT if
/// set, else 60 seconds. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT for less than 1.
warplink_status warplink_set_bootstrap_timeout(int32_t seconds);

/// Joins as `rank` of `size` ranks that meet at `address`, the "ip:port" of rank 0. Blocks until all have joined.
/// Without a secret (`options`, WARPLINK_SECRET) it must be a loopback address. `options` may be null.
///
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT if the rank is not below `size` or the options come from another version's
/// header; WARPLINK_STATUS_PARSE if a string is not a valid address or device; WARPLINK_STATUS_TIMEOUT if ranks are
/// missing at the timeout; WARPLINK_STATUS_MISMATCH if ranks have another size or another kind of device;
/// WARPLINK_STATUS_AUTHENTICATION if secrets differ; WARPLINK_STATUS_ADDRESS_IN_USE if another process listens on the
/// address; and WARPLINK_STATUS_DRIVER, WARPLINK_STATUS_LIBRARY_MISSING or WARPLINK_STATUS_UNSUPPORTED if the device is
/// not available.
warplink_status warplink_init(warplink_comm *comm,
                              int32_t size,
                              const char *address,
                              int32_t rank,
                              const warplink_options *options);

/// Joins as `rank` of `size` ranks that share the same id. Blocks until all have joined. `options` may be null. Fails
/// as `warplink_init` does; returns WARPLINK_STATUS_INVALID_HANDLE for bytes that are no id.
warplink_status warplink_init_from_id(warplink_comm *comm,
                                      int32_t size,
                                      const warplink_unique_id *id,
                                      int32_t rank,
                                      const warplink_options *options);

/// Joins as configured by the launcher of this process: `warplink launch`, torchrun, mpirun or srun. Blocks until all
/// ranks have joined. `options` may be null. Fails as `warplink_init` does; returns WARPLINK_STATUS_INVALID_ARGUMENT
/// for missing variables, and WARPLINK_STATUS_PARSE for variables that are not numbers.
warplink_status warplink_init_from_env(warplink_comm *comm,
                                       const warplink_options *options);

/// This rank's number, from 0. Does not block.
warplink_status warplink_rank(warplink_comm comm, int32_t *rank);

/// The number of ranks. Does not block.
warplink_status warplink_size(warplink_comm comm, int32_t *size);

/// All-gathers `bytes` bytes per rank through the hosts: `data` has space for the bytes of all ranks, in rank order,
/// and holds this rank's at their position. Blocks until every rank has called it with the same length. Returns
/// WARPLINK_STATUS_MISMATCH on every rank if lengths differ, and WARPLINK_STATUS_TIMEOUT if a rank does not call it.
warplink_status warplink_all_gather(warplink_comm comm,
                                    void *data,
                                    size_t bytes);

/// Blocks until every rank has called it. It orders hosts, not streams. Returns WARPLINK_STATUS_TIMEOUT if a rank does
/// not call it, and WARPLINK_STATUS_PEER_LOST or WARPLINK_STATUS_PEER_LEFT if one is gone.
warplink_status warplink_barrier(warplink_comm comm);

/// Leaves in an orderly manner. Blocks until every rank has called it and until this rank's streams have finished with
/// Warplink's resources. Afterwards the communicator and everything created with it (regions, streams, modules ...) are
/// unusable, even if this fails; borrowed streams that are not capturing a graph are released. Peers treat a process
/// that ends without this call as lost. Returns WARPLINK_STATUS_TIMEOUT if a stream still waits for a peer at the
/// timeout or a rank does not call it, and WARPLINK_STATUS_PEER_LOST if a rank was lost; this rank then leaves as with
/// `warplink_abort`.
warplink_status warplink_destroy(warplink_comm comm);

/// Leaves with a failure: the peers' waits, including those of kernels, end with an error that contains this rank and
/// `reason`, and so do the waits in this rank's streams. Blocks for about two seconds at most. Later calls that involve
/// other ranks fail. The communicator must still be destroyed, which then fails as well. A second abort does nothing.
warplink_status warplink_abort(warplink_comm comm,
                               const char *reason);

/// Allocates `bytes` bytes of device memory that peers may access. The content is undefined. Blocks briefly; if memory
/// is short, waits about two seconds for peers to unmap freed memory, then returns WARPLINK_STATUS_OUT_OF_MEMORY.
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT for 0 bytes.
warplink_status warplink_alloc(warplink_comm comm,
                               size_t bytes,
                               warplink_region *region);

/// Registers `bytes` bytes at `address` that the caller allocated (by cudaMalloc, for example). They must stay
/// allocated until `warplink_region_free` of the region has succeeded or the communicator is destroyed. On the host
/// device, they must be within memory allocated by `warplink_alloc`. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT if the range passes the end of an allocation, and WARPLINK_STATUS_UNSUPPORTED if
/// the memory cannot be shared.
warplink_status warplink_register(warplink_comm comm,
                                  void *address,
                                  size_t bytes,
                                  warplink_region *region);

/// Frees a region. Allocated memory is reused once no stream, connection or peer uses it any more; this does not block.
/// For registered memory, blocks until no peer maps it, after which its owner may free it. Fails for registered memory
/// if a connection of this rank uses it (WARPLINK_STATUS_INVALID_ARGUMENT), a concurrent call uses it
/// (WARPLINK_STATUS_INVALID_USAGE), or a peer does not unmap it in time (WARPLINK_STATUS_TIMEOUT): then it must stay
/// allocated until the communicator is destroyed.
warplink_status warplink_region_free(warplink_region region);

/// The address of the region's first byte in this process, on its device. Does not block.
warplink_status warplink_region_address(warplink_region region, void **address);

/// The region's length in bytes. Does not block.
warplink_status warplink_region_bytes(warplink_region region, size_t *bytes);

/// Copies the bytes of the span from host memory to the region, and returns when the copy is complete. Not ordered
/// after work in any stream. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the span passes the end of the region.
/// `source` may be null if the span is empty.
warplink_status warplink_upload(warplink_span target,
                                const void *source);

/// Copies the bytes of the span from the region to host memory, and returns when the copy is complete. Otherwise as
/// `warplink_upload`.
warplink_status warplink_download(void *target,
                                  warplink_span source);

/// Enqueues a copy between regions of this rank, of the same length. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT if lengths differ or a span passes the end of its region.
warplink_status warplink_copy(warplink_span target, warplink_span source, warplink_stream stream);

/// Creates a stream. Does not wait for other work of the device, but may block briefly.
warplink_status warplink_stream_create(warplink_comm comm, warplink_stream *stream);

/// Borrows a CUDA stream (a CUstream or cudaStream_t) of the rank's GPU, in its primary context. It must stay valid
/// until `warplink_stream_destroy`, which does not destroy the CUDA stream. Null is the legacy default stream. Does not
/// block. Returns WARPLINK_STATUS_UNSUPPORTED on the host device.
warplink_status warplink_stream_borrow(warplink_comm comm,
                                       void *cuda_stream,
                                       warplink_stream *stream);

/// Destroys the handle, on any thread. Enqueued work still completes. Does not block. While a borrowed stream is
/// capturing a graph, returns WARPLINK_STATUS_INVALID_ARGUMENT and leaves it borrowed.
warplink_status warplink_stream_destroy(warplink_stream stream);

/// The underlying CUDA stream on a GPU; on the host device, a number unique to the stream. Does not block.
warplink_status warplink_stream_raw(warplink_stream stream, void **raw);

/// Blocks until all work enqueued so far is complete. Returns the error of failed work in the stream,
/// WARPLINK_STATUS_PEER_LOST if a rank was lost, and WARPLINK_STATUS_TIMEOUT, naming the peer that the stream waits
/// for, if the timeout passes first.
warplink_status warplink_stream_synchronize(warplink_stream stream);

/// Makes the stream wait until the peer has signalled `epoch` times in total through the connection with that peer and
/// tag. Consumes no signal. Does not block the caller. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the connection was
/// not declared, and WARPLINK_STATUS_INVALID_USAGE if it was not set up.
warplink_status warplink_stream_wait(warplink_stream stream,
                                     warplink_comm comm,
                                     int32_t peer,
                                     uint64_t tag,
                                     uint64_t epoch);

/// Declares a connection to `peer`, which declares its end with the same tag and transport. `region` is this rank's
/// memory for it; the peer's may have another length. `transport` is a `warplink_transport`. `network_devices` is a
/// comma-separated list of this rank's network devices to use, as UCX names them ("mlx5_0:1", "eth0"); null selects
/// all, and must be null with other transports than the network. Does not communicate and does not block;
/// `warplink_setup` connects the declared connections. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the rank is no peer,
/// the peer and tag were declared before, or the transport is unknown.
warplink_status warplink_connect(warplink_comm comm,
                                 int32_t peer,
                                 uint64_t tag,
                                 warplink_region region,
                                 int32_t transport,
                                 const char *network_devices);

/// Connects all connections declared since the last setup. Blocks until the peers have set up their ends; then kernels
/// of both ranks may use the channels. Starts the proxy if a connection needs it. If it fails, the declarations remain,
/// and it may be called again. It may be called with nothing declared. Returns WARPLINK_STATUS_TIMEOUT if a peer does
/// not set up its end, WARPLINK_STATUS_MISMATCH on both ranks if their transports differ, WARPLINK_STATUS_UNSUPPORTED
/// for a direct connection to another machine, and WARPLINK_STATUS_LIBRARY_MISSING for a network connection without
/// UCX.
warplink_status warplink_setup(warplink_comm comm);

/// The channel of the connection to `peer` with `tag`, for a kernel launched by other means than `warplink_launch`. It
/// is valid until the communicator is destroyed. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the
/// connection was not declared, and WARPLINK_STATUS_INVALID_USAGE if it was not set up.
warplink_status warplink_channel_get(warplink_comm comm,
                                     int32_t peer,
                                     uint64_t tag,
                                     warplink_channel *channel);

/// The channels of all connections, in order of declaration. Writes up to `capacity` of them to `channels`, which may
/// be null if `capacity` is 0, and their total number to `count`. Does not block. Returns WARPLINK_STATUS_INVALID_USAGE
/// before the first setup.
warplink_status warplink_channel_get_all(warplink_comm comm,
                                         warplink_channel *channels,
                                         size_t capacity,
                                         size_t *count);

/// Call this after launching kernels that use channels on `stream` by other means than `warplink_launch`: it keeps the
/// memory behind the channels alive until the stream has passed the kernels, and makes the proxy poll for triggers
/// immediately. Does not block. Returns WARPLINK_STATUS_INVALID_USAGE before the first setup, and the proxy's error if
/// the proxy has failed.
warplink_status warplink_launched(warplink_comm comm,
                                  warplink_stream stream);

/// Enqueues a copy of this rank's bytes to the peer's memory, starting at `target`. Does not block. The copy is not
/// ordered with operations of kernels, except by signals of a later kernel on `stream`. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT if a range passes the end of a region or the connection was not declared, and
/// WARPLINK_STATUS_INVALID_USAGE if it was not set up. Over the network, returns WARPLINK_STATUS_UNSUPPORTED while the
/// stream is capturing a graph, and WARPLINK_STATUS_CLOSED if the proxy was stopped.
warplink_status warplink_write(warplink_comm comm,
                               int32_t peer,
                               uint64_t tag,
                               warplink_at target,
                               warplink_span source,
                               warplink_stream stream);

/// Enqueues a copy of the peer's memory, starting at `source`, to this rank's bytes. Does not block; see
/// `warplink_write`.
warplink_status warplink_read(warplink_comm comm,
                              int32_t peer,
                              uint64_t tag,
                              warplink_span target,
                              warplink_at source,
                              warplink_stream stream);

/// Restarts proxies stopped by `warplink_proxy_stop`, and makes running ones poll for triggers immediately.
/// `warplink_setup` starts them, so otherwise this is only needed before launching a graph with proxied channels, and
/// for programs ported from MSCCL++. No kernel may use proxied channels during a restart. Blocks while a kernel
/// completes a trigger that it has begun to store, for at most one second per proxy; after that returns
/// WARPLINK_STATUS_TIMEOUT. Returns WARPLINK_STATUS_INVALID_USAGE before the first setup, WARPLINK_STATUS_CLOSED if the
/// stop left requests unprocessed, and the proxy's error if a proxy has failed.
warplink_status warplink_proxy_launch(warplink_comm comm);

/// Stops the proxy: it processes all pending requests of kernels and exits. Blocks until then. Kernels that use proxied
/// channels later get the status `aborted`; direct channels keep working. Does nothing if no proxy runs. Returns
/// WARPLINK_STATUS_INVALID_USAGE before the first setup, and WARPLINK_STATUS_TIMEOUT, with the number of unsent
/// triggers, if the timeout passes first.
warplink_status warplink_proxy_stop(warplink_comm comm);

/// Adds a region to all connections that are set up. Every peer must make the same number of calls, each with a region
/// of its own. Blocks until the peers have called it. Kernels then address the region as `warplink::At(number,
/// offset)`. Returns WARPLINK_STATUS_INVALID_USAGE before the first setup, and WARPLINK_STATUS_TIMEOUT if a peer does
/// not call it. A connection has at most 16 regions.
warplink_status warplink_register_buffer(warplink_comm comm,
                                         warplink_region region,
                                         warplink_buffer *buffer);

/// The number of the buffer, for use in kernels, on the connection to `peer` with `tag`. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT for a connection without the buffer: only connections set up before it was
/// registered have it.
warplink_status warplink_buffer_number(warplink_buffer buffer,
                                       int32_t peer,
                                       uint64_t tag,
                                       uint32_t *number);

/// Enqueues copies of this rank's bytes to the buffers of all peers, starting at byte `offset`; one copy per
/// connection. Does not block, and orders nothing at the peers: signal them, or meet at a barrier after
/// `warplink_stream_synchronize`. Fails as `warplink_write` does; copies to connections before the one that failed may
/// have been enqueued.
warplink_status warplink_registered_write(warplink_buffer buffer,
                                          uint64_t offset,
                                          warplink_span source,
                                          warplink_stream stream);

/// Frees the handle. The region stays with the connections until the communicator is destroyed. Does not block.
warplink_status warplink_buffer_free(warplink_buffer buffer);

/// Loads code. On a GPU it compiles the source unless the result is cached, and may block until running kernels finish:
/// load modules, and get their kernels, before running any kernel that waits for a peer. On the host device, only the
/// bodies are used.
///
/// Returns WARPLINK_STATUS_UNSUPPORTED if the source contains no code for the device, WARPLINK_STATUS_INVALID_ARGUMENT
/// on any device if the image is malformed or truncated, WARPLINK_STATUS_DRIVER with the compiler's messages if the
/// text does not compile or the image is for another GPU, and WARPLINK_STATUS_LIBRARY_MISSING if NVRTC is missing.
///
/// The caller must ensure that the kernels access only memory that their arguments refer to.
warplink_status warplink_module_load(warplink_comm comm,
                                     const warplink_module_source *source,
                                     warplink_module *module);

/// Frees a module. Its kernels stay valid. Does not block.
warplink_status warplink_module_free(warplink_module module);

/// Gets the kernel `name` of a module, ready to be launched. On a GPU it may block as `warplink_module_load` does.
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT if the module has no kernel of that name.
warplink_status warplink_kernel_get(warplink_module module,
                                    const char *name,
                                    warplink_kernel *kernel);

/// Frees a kernel. Running and enqueued launches continue. Does not block.
warplink_status warplink_kernel_free(warplink_kernel kernel);

/// Enqueues a kernel on `stream`, with one argument for each of its parameters. Does not block. Regions passed as
/// arguments must not be freed until it has finished; memory behind channels is kept alive automatically. The stream
/// fails if a rank is lost that the kernel's channels connect to.
///
/// Returns WARPLINK_STATUS_INVALID_ARGUMENT for an empty shape, too many blocks (more than 256 on the host device),
/// and, as far as the driver can check, arguments that do not match the parameters; WARPLINK_STATUS_INVALID_USAGE for
/// channels before `warplink_setup`. `warplink_stream_synchronize` returns errors of the kernel itself.
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

/// An argument: the channels of all connections that are set up, in order of declaration, a `const warplink::Channel
/// *`. A host kernel selects one of them by `warplink_block_channel`. The first launch after a setup copies them to the
/// device, which blocks briefly; the copy stays until the communicator is destroyed, because a captured graph may refer
/// to it.
warplink_argument warplink_argument_channels(warplink_comm comm);

/// In a host kernel: returns the block's index in the grid, starting at 0, and the number of blocks. Either pointer may
/// be null. Does not block.
warplink_status warplink_block_index(uint32_t *index,
                                     uint32_t *blocks);

/// In a host kernel: the number of threads that a block of this launch would have on a GPU. The body itself runs on one
/// thread. Does not block.
warplink_status warplink_block_threads(uint32_t *threads);

/// In a host kernel: reads argument `argument` of the launch, an unsigned integer of 32 or 64 bits. Does not block.
warplink_status warplink_block_u64(uint32_t argument,
                                   uint64_t *value);

/// In a host kernel: reads argument `argument` of the launch, a signed integer of 32 or 64 bits. Does not block.
warplink_status warplink_block_i64(uint32_t argument,
                                   int64_t *value);

/// In a host kernel: reads argument `argument` of the launch, a float or double. Does not block.
warplink_status warplink_block_f64(uint32_t argument, double *value);

/// In a host kernel: copies `bytes` bytes to `target`, in ordinary host memory, and returns when the copy is complete.
/// If `argument` is a channel, given by either kind of number, the bytes are read from `source` in this rank's regions;
/// if it is a region, from byte `source.offset` of the region. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the range
/// passes the end of the region. `target` may be null if `bytes` is 0.
warplink_status warplink_block_load(uint32_t argument,
                                    void *target,
                                    warplink_at source,
                                    size_t bytes);

/// In a host kernel: copies `bytes` bytes from `source`, in ordinary host memory, to `argument`, and returns when the
/// copy is complete; see `warplink_block_load`.
warplink_status warplink_block_store(uint32_t argument,
                                     warplink_at target,
                                     const void *source,
                                     size_t bytes);

/// In a host kernel: the number of channels in the array passed as argument `argument` (`warplink_argument_channels`).
/// Does not block.
warplink_status warplink_block_channels(uint32_t argument,
                                        uint32_t *count);

/// In a host kernel: the number that identifies channel `index` (from 0) of the array passed as argument `argument` in
/// the other calls. It is valid for all blocks of the launch. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the index is
/// out of range. Does not block.
warplink_status warplink_block_channel(uint32_t argument,
                                       uint32_t index,
                                       uint32_t *channel);

/// In a host kernel: the rank at the other end of a channel. Does not block.
warplink_status warplink_block_peer(uint32_t channel, int32_t *peer);

/// In a host kernel: copies `bytes` bytes from `source` in this rank's regions to `target` in the peer's. Does not wait
/// for the copy: the source may be overwritten after a flush, and the peer may read the data after a signal.
warplink_status warplink_block_put(uint32_t channel,
                                   warplink_at target,
                                   warplink_at source,
                                   uint64_t bytes);

/// In a host kernel: copies `bytes` bytes from `source` in the peer's regions to `target` in this rank's. Does not wait
/// for the copy: the data may be read after a flush.
warplink_status warplink_block_get(uint32_t channel,
                                   warplink_at target,
                                   warplink_at source,
                                   uint64_t bytes);

/// In a host kernel: a put followed by a signal. Does not wait for the copy.
warplink_status warplink_block_put_with_signal(uint32_t channel,
                                               warplink_at target,
                                               warplink_at source,
                                               uint64_t bytes);

/// In a host kernel: a put, a signal and a flush. Blocks until the source may be overwritten.
warplink_status warplink_block_put_with_signal_and_flush(uint32_t channel,
                                                         warplink_at target,
                                                         warplink_at source,
                                                         uint64_t bytes);

/// In a host kernel: increments the peer's epoch by one, ordered after all earlier operations of the block. Does not
/// wait for the peer.
warplink_status warplink_block_signal(uint32_t channel);

/// In a host kernel: blocks until sources of earlier puts on this channel may be overwritten and the data of earlier
/// gets may be read.
warplink_status warplink_block_flush(uint32_t channel);

/// In a host kernel: blocks until the peer has sent one signal more than this side has consumed, and consumes it.
warplink_status warplink_block_wait(uint32_t channel);

/// In a host kernel: blocks until the peer has signalled `epoch` times in total. Consumes no signal.
warplink_status warplink_block_wait_until(uint32_t channel, uint64_t epoch);

/// In a host kernel: the non-blocking form of `warplink_block_wait`. Sets `arrived` to 1 if a signal was consumed, else
/// to 0.
warplink_status warplink_block_poll(uint32_t channel,
                                    int32_t *arrived);

/// In a host kernel: the total number of signals received from the peer so far. Does not block.
warplink_status warplink_block_epoch(uint32_t channel, uint64_t *epoch);

/// In a host kernel: signals on each of `count` channels, then waits for a signal on each. Blocks until all peers have
/// made the matching call. An element of `channels` may also be the number of an argument that is a channel array,
/// which selects all channels of that array. `channels` may be null if `count` is 0.
warplink_status warplink_block_barrier(const uint32_t *channels,
                                       size_t count);

/// In a host kernel: puts `bytes` bytes from `source` here to `target` at the peer as packets of 8 bytes, each with 4
/// bytes of data, so the target takes 2 * `bytes`. The flag must differ from the flag stored there before (count up
/// from 1). `bytes` and the source's offset are multiples of 4, the target's offset of 8; otherwise returns
/// WARPLINK_STATUS_INVALID_ARGUMENT. Requires a direct channel and returns WARPLINK_STATUS_UNSUPPORTED on others. Does
/// not wait for the peer.
warplink_status warplink_block_put_packets8(uint32_t channel,
                                            warplink_at target,
                                            warplink_at source,
                                            uint64_t bytes,
                                            uint32_t flag);

/// In a host kernel: unpacks `bytes` bytes that the peer put to `source` here as packets of 8 bytes with the same flag,
/// into `target` here. Blocks until the packets have arrived.
warplink_status warplink_block_read_packets8(uint32_t channel,
                                             warplink_at target,
                                             warplink_at source,
                                             uint64_t bytes,
                                             uint32_t flag);

/// In a host kernel: as `warplink_block_put_packets8`, with packets of 16 bytes, each with 8 bytes of data: the target
/// takes 2 * `bytes`. `bytes` and the source's offset are multiples of 8, the target's offset of 16.
warplink_status warplink_block_put_packets16(uint32_t channel,
                                             warplink_at target,
                                             warplink_at source,
                                             uint64_t bytes,
                                             uint32_t flag);

/// In a host kernel: as `warplink_block_read_packets8`, with packets of 16 bytes.
warplink_status warplink_block_read_packets16(uint32_t channel,
                                              warplink_at target,
                                              warplink_at source,
                                              uint64_t bytes,
                                              uint32_t flag);

/// In a host kernel: as `warplink_block_put_packets8`, with packets of 128 bytes, each with 120 bytes of data: the
/// target takes 128 bytes for every 120 bytes of data or remainder of them. `bytes` and the source's offset are
/// multiples of 8, the target's offset of 128.
warplink_status warplink_block_put_packets128(uint32_t channel,
                                              warplink_at target,
                                              warplink_at source,
                                              uint64_t bytes,
                                              uint64_t flag);

/// In a host kernel: as `warplink_block_read_packets8`, with packets of 128 bytes.
warplink_status warplink_block_read_packets128(uint32_t channel,
                                               warplink_at target,
                                               warplink_at source,
                                               uint64_t bytes,
                                               uint64_t flag);

/// The default options. Does not block.
warplink_collective_options warplink_collective_options_default(void);

/// Creates a group of collectives over all ranks, with its own workspace. Collective: blocks until every rank has
/// called it. Null options select the defaults. Returns WARPLINK_STATUS_TIMEOUT if a rank does not call it,
/// WARPLINK_STATUS_MISMATCH if options differ, WARPLINK_STATUS_PEER_FAILED on the other ranks if one cannot join, and
/// WARPLINK_STATUS_LIBRARY_MISSING if NCCL is needed and missing.
warplink_status warplink_collectives_join(warplink_comm comm,
                                          const warplink_collective_options *options,
                                          warplink_collectives *collectives);

/// Frees a group of collectives. Enqueued calls still complete. Does not block.
warplink_status warplink_collectives_free(warplink_collectives collectives);

/// The communicator of the vendor's library (an ncclComm_t on GPUs) that calls go to; null if they do not use that
/// library. It is valid until `warplink_collectives_free`, unless a rank is lost. Does not block.
warplink_status warplink_collectives_communicator(warplink_collectives collectives,
                                                  void **communicator);

/// How a call would be performed. All ranks get the same answer. Does not block. Returns WARPLINK_STATUS_UNSUPPORTED if
/// the direct path would perform it and the options allow only an algorithm that does not implement this call.
warplink_status warplink_collectives_choice(warplink_collectives collectives,
                                            const warplink_collective_call *call,
                                            warplink_collective_choice *choice);

/// The path of `warplink_send_receive` and `warplink_all_to_all_v`: "direct" or "engine"; null if messages cannot reach
/// the other ranks. The string is static. Does not block.
warplink_status warplink_collectives_message_path(warplink_collectives collectives,
                                                  const char **path);

/// Enqueues a collective. `output` and `input` are device addresses, in any memory that stays allocated until the
/// stream is synchronized; their lengths follow from the call's `count`. They may be the same memory; for all-gather
/// and gather the input may be this rank's part of the output, and for reduce-scatter and scatter the output may be
/// this rank's part of the input. Operands that this rank does not use may be null. Does not block. Returns
/// WARPLINK_STATUS_INVALID_ARGUMENT for an unknown kind, type or operator, an operator that the collective does not
/// support, a root that is no rank, and null for a required operand. If ranks make different calls,
/// `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH.
warplink_status warplink_collective(warplink_collectives collectives,
                                    const warplink_collective_call *call,
                                    void *output,
                                    const void *input,
                                    warplink_stream stream);

/// Binds a collective to memory, for calls repeated on the same buffers, so that the copy engine can perform large
/// all-gathers and all-to-alls. Arguments are those of `warplink_collective`. Peers may map the memory: it must stay
/// allocated until all ranks have called `warplink_bound_call_free` and the streams of the calls are synchronized. All
/// ranks bind the same call collectively; blocks until all have. Returns WARPLINK_STATUS_MISMATCH if ranks bind
/// different calls. If a rank does not bind, or its arguments are rejected, the other ranks get WARPLINK_STATUS_TIMEOUT
/// or WARPLINK_STATUS_PEER_FAILED.
warplink_status warplink_bind_collective(warplink_collectives collectives,
                                         const warplink_collective_call *call,
                                         void *output,
                                         const void *input,
                                         warplink_bound_call *bound);

/// Enqueues a bound call once. It counts as a collective call: all ranks make their calls in the same order. Does not
/// block. Errors are those of `warplink_collective`.
warplink_status warplink_bound_call_enqueue(warplink_bound_call bound,
                                            warplink_stream stream);

/// How a bound call is performed; the algorithm is "copy-engine" if the copy engine performs it. Does not block.
warplink_status warplink_bound_call_choice(warplink_bound_call bound,
                                           warplink_collective_choice *choice);

/// Frees a bound call. Enqueued calls still complete. Does not block.
warplink_status warplink_bound_call_free(warplink_bound_call bound);

/// An all-reduce with null memory, no norm and no quantisation. Does not block.
warplink_fused_call warplink_fused_call_default(void);

/// Enqueues a collective of rows with its fused operations, as one kernel. All ranks get bit-identical results.
/// Requires the direct path: returns WARPLINK_STATUS_UNSUPPORTED on the path of the vendor's library, and for rows that
/// are too long for the workspace. Returns WARPLINK_STATUS_INVALID_ARGUMENT if members are inconsistent with one
/// another or with the memory, or the struct comes from another version's header. If ranks make different calls,
/// `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH. Does not block.
warplink_status warplink_fused_collective(warplink_collectives collectives,
                                          const warplink_fused_call *call,
                                          warplink_stream stream);

/// Performs all `messages` concurrently, on device memory that stays allocated until the stream is synchronized. The
/// n-th send to a rank matches the n-th receive there from this one, of the same length. Only the two ranks of a
/// message take part, and may group their messages differently, as long as some order lets all of them progress; both
/// ends of a message to this rank itself belong in one group. Received data overlaps no other memory of the group. A
/// group has at most 64 messages. Does not block. On the direct path, if lengths of both ends differ,
/// `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH on both ranks.
warplink_status warplink_send_receive(warplink_collectives collectives,
                                      const warplink_message *messages,
                                      size_t count,
                                      warplink_stream stream);

/// Sets part p of `output` to this rank's part of rank p's `input`, for each rank p, with a length for each pair of
/// ranks. Counts are in elements of a `warplink_element_type`; the count sent to a rank equals the count that it
/// expects. Parts of the input may overlap, those of the output may not. Memory without elements may be null.
/// Collective; does not block, and fails as `warplink_send_receive` does.
warplink_status warplink_all_to_all_v(warplink_collectives collectives,
                                      int32_t element_type,
                                      void *output,
                                      warplink_parts output_parts,
                                      const void *input,
                                      warplink_parts input_parts,
                                      warplink_stream stream);

/// As `warplink_all_to_all_v`, with counts in device memory: `sent` holds the number of elements for each rank, and
/// `received` is set to the number of elements from each, as one 64-bit integer per rank. `max_count` limits each count
/// and is the same on all ranks; the part of rank p begins at element p * max_count of `output` and `input`, which have
/// space for max_count elements per rank. Elements beyond the count are left unchanged. Memory that is written overlaps
/// nothing. A captured graph is valid for all counts up to the limit. Collective; does not block.
///
/// If a count exceeds the limit, or limit or element size differ at the other end, `warplink_stream_synchronize`
/// returns WARPLINK_STATUS_MISMATCH on both ranks. Returns WARPLINK_STATUS_UNSUPPORTED if messages do not use the
/// direct path (`warplink_collectives_message_path`).
warplink_status warplink_all_to_all_v_on_device(warplink_collectives collectives,
                                                int32_t element_type,
                                                void *output,
                                                uint64_t *received,
                                                const void *input,
                                                const uint64_t *sent,
                                                uint64_t max_count,
                                                warplink_stream stream);

/// Creates a layer of experts, with memory for its calls. Does not communicate; blocks while kernels are compiled, the
/// first time on a machine. Requires the direct path. Calls of one layer execute one after another; for concurrent
/// calls, create several layers. Returns WARPLINK_STATUS_INVALID_ARGUMENT if options are inconsistent, and
/// WARPLINK_STATUS_UNSUPPORTED on the path of the vendor's library.
warplink_status warplink_experts_create(warplink_collectives collectives,
                                        const warplink_expert_options *options,
                                        warplink_experts *experts);

/// Frees a layer. Enqueued calls still complete. Does not block.
warplink_status warplink_experts_free(warplink_experts experts);

/// The most rows that one rank sends to one other rank in a call. Does not block.
warplink_status warplink_experts_max_rows(warplink_experts experts, uint64_t *max_rows);

/// Sends each token to the ranks of its experts, in the layer's layout. `target` receives the rows, their counts and the
/// other arrays that describe them; `routing` is a handle for `warplink_experts_combine`, which `warplink_routing_free`
/// frees. All memory is device memory and stays allocated until the stream is synchronized. Collective: the number of
/// tokens may differ between ranks. Does not block. If a rank gets more rows than `max_rows`, unless they are dropped, or
/// options differ, `warplink_stream_synchronize` returns WARPLINK_STATUS_MISMATCH on both ranks, and none of these rows is
/// delivered.
warplink_status warplink_experts_dispatch(warplink_experts experts,
                                          const warplink_tokens *tokens,
                                          const warplink_dispatched *target,
                                          warplink_routing *routing,
                                          warplink_stream stream);

/// Sets `output` (`[count, elements]`), for each of the `count` tokens of the dispatch that `routing` is of, to the sum of its
/// rows, each multiplied by its weight in `weights` (`[count, top_k]`, or `[count, size]` with the layout ONCE_PER_RANK; null
/// adds rows up as they are): in `float`, in slot order, rounded once. `results` are the experts' results in place of the
/// dispatched rows, of the layer's element type. Dropped rows are left out, and other weights stay as they are. A token
/// without rows gets zeros. Collective. Does not block. Returns WARPLINK_STATUS_INVALID_ARGUMENT if the routing is of
/// another layer.
warplink_status warplink_experts_combine(warplink_experts experts,
                                         void *output,
                                         const void *results,
                                         const float *weights,
                                         warplink_routing routing,
                                         warplink_stream stream);

/// Frees the routing of a dispatch, whose memory a later dispatch uses again. Enqueued calls still complete. Keep it as long as
/// a graph of that dispatch or of its combine may be launched. Does not block.
warplink_status warplink_routing_free(warplink_routing routing);

/// Sets the handler of log messages and the pointer passed to it. Null restores the default handler. Blocks while the
/// previous handler runs on any thread: it is never called after this returns. WARPLINK_LOG sets the level: "error",
/// "warn" (the default), "info", "debug", "trace", or a filter of the `tracing` crates. Returns
/// WARPLINK_STATUS_INVALID_USAGE if another library of the process has installed a `tracing` subscriber before.
warplink_status warplink_set_log_handler(warplink_log_handler handler,
                                         void *user);

/// The default handler, which writes to standard error. `user` is ignored. A null message is dropped.
void warplink_default_log_handler(int32_t level, const char *message, void *user);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* WARPLINK_H */
