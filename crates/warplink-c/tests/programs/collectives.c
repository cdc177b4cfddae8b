/* One of several ranks that make collectives. Arguments: rank, size, address. */

#include "check.h"

enum { COUNT = 1000 };

static warplink_comm comm;
static int32_t rank, size;

static warplink_collective_call call(int32_t kind, int32_t op, int32_t root, uint64_t count) {
    warplink_collective_call made;
    made.kind = kind;
    made.element_type = WARPLINK_ELEMENT_TYPE_I32;
    made.op = op;
    made.root = root;
    made.count = count;
    made.factor = 0.5;
    return made;
}

/* Element `at` of a rank's input. */
static int32_t number(int32_t from, int at) { return 100000 * (from + 1) + at; }

static void all_kinds(warplink_collectives collectives, warplink_stream stream, warplink_region region) {
    const int32_t last = size - 1;
    int32_t sum = 0;
    int32_t *words = (int32_t *)malloc(sizeof(int32_t) * COUNT * (size_t)(size + 1));
    void *address = NULL;
    warplink_collective_call made;
    HOLDS(words != NULL);
    OK(warplink_region_address(region, &address));
    int32_t *input = (int32_t *)address, *output = input + COUNT;
    for (int i = 0; i < COUNT; i++) words[i] = number(rank, i);
    OK(warplink_upload(span(region, 0, sizeof(int32_t) * COUNT), words));

    made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_SUM, -1, COUNT);
    OK(warplink_collective(collectives, &made, output, input, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(words, span(region, sizeof(int32_t) * COUNT, sizeof(int32_t) * COUNT)));
    for (int i = 0; i < COUNT; i++) {
        sum = 0;
        for (int32_t from = 0; from < size; from++) sum += number(from, i);
        HOLDS(words[i] == sum);
    }

    made = call(WARPLINK_COLLECTIVE_KIND_ALL_GATHER, WARPLINK_REDUCE_OP_NONE, -1, COUNT);
    OK(warplink_collective(collectives, &made, output, input, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(words, span(region, sizeof(int32_t) * COUNT, sizeof(int32_t) * COUNT * (uint64_t)size)));
    for (int i = 0; i < COUNT * size; i++) HOLDS(words[i] == number(i / COUNT, i % COUNT));

    /* Those that are not the root have no output. */
    made = call(WARPLINK_COLLECTIVE_KIND_REDUCE, WARPLINK_REDUCE_OP_MAX, last, COUNT);
    OK(warplink_collective(collectives, &made, rank == last ? output : NULL, input, stream));
    /* Nor an input, where the root gives it. */
    made = call(WARPLINK_COLLECTIVE_KIND_BROADCAST, WARPLINK_REDUCE_OP_NONE, 0, COUNT);
    OK(warplink_collective(collectives, &made, output + COUNT, rank == 0 ? input : NULL, stream));
    made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_SUM, -1, 0);
    OK(warplink_collective(collectives, &made, NULL, NULL, stream));
    made = call(WARPLINK_COLLECTIVE_KIND_BARRIER, WARPLINK_REDUCE_OP_NONE, -1, 0);
    OK(warplink_collective(collectives, &made, NULL, NULL, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(words, span(region, sizeof(int32_t) * COUNT, sizeof(int32_t) * COUNT * 2)));
    for (int i = 0; i < COUNT; i++) {
        HOLDS(rank != last || words[i] == number(last, i));
        HOLDS(words[COUNT + i] == number(0, i));
    }
    free(words);
}

/* What all ranks have, multiplied before it is summed. */
static void scaled(warplink_collectives collectives, warplink_stream stream, warplink_region region) {
    float values[COUNT];
    void *address;
    warplink_collective_call made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_SCALED_SUM, -1, COUNT);
    made.element_type = WARPLINK_ELEMENT_TYPE_F32;
    OK(warplink_region_address(region, &address));
    for (int i = 0; i < COUNT; i++) values[i] = (float)(rank + i % 8);
    OK(warplink_upload(span(region, 0, sizeof(values)), values));
    OK(warplink_collective(collectives, &made, address, address, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(values, span(region, 0, sizeof(values))));
    for (int i = 0; i < COUNT; i++)
        HOLDS(values[i] == 0.5f * (float)(size * (size - 1) / 2 + size * (i % 8)));
    made.element_type = WARPLINK_ELEMENT_TYPE_I32;
    FAILS(warplink_collective(collectives, &made, address, address, stream), WARPLINK_STATUS_UNSUPPORTED,
        "expected floats");
}

static void misuse(warplink_collectives collectives, warplink_stream stream, void *memory) {
    warplink_collective_options options = warplink_collective_options_default();
    warplink_collectives none;
    warplink_collective_call made = call(99, WARPLINK_REDUCE_OP_NONE, -1, 1);
    FAILS(warplink_collective(collectives, &made, memory, memory, stream), WARPLINK_STATUS_INVALID_ARGUMENT,
        "unknown collective 99");
    made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, 77, -1, 1);
    FAILS(warplink_collective(collectives, &made, memory, memory, stream), WARPLINK_STATUS_INVALID_ARGUMENT,
        "unknown operator 77");
    made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_NONE, -1, 1);
    FAILS(warplink_collective(collectives, &made, memory, memory, stream), WARPLINK_STATUS_INVALID_ARGUMENT,
        "all_reduce requires an operator");
    made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_SUM, -1, 1);
    FAILS(warplink_collective(collectives, &made, NULL, memory, stream), WARPLINK_STATUS_INVALID_ARGUMENT,
        "output is null");
    FAILS(warplink_collective(collectives, NULL, memory, memory, stream), WARPLINK_STATUS_INVALID_ARGUMENT,
        "call is null");
    options.path = "fast";
    FAILS(warplink_collectives_join(comm, &options, &none), WARPLINK_STATUS_PARSE, "unknown path 'fast'");
    options.path = NULL;
    options.algorithm = "ring";
    FAILS(warplink_collectives_join(comm, &options, &none), WARPLINK_STATUS_PARSE, "unknown algorithm 'ring'");
}

/* Which path and algorithm a call has, also where one algorithm alone is allowed. */
static void chosen(warplink_collectives open, warplink_stream stream, warplink_region region) {
    warplink_collective_options options = warplink_collective_options_default();
    warplink_collective_choice choice;
    warplink_collectives forced;
    warplink_collective_call made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_SUM, -1, COUNT);
    OK(warplink_collectives_choice(open, &made, &choice));
    HOLDS(strcmp(choice.path, "direct") == 0 && choice.algorithm != NULL);
    HOLDS(choice.lanes > 0 && choice.threads > 0 && choice.chunks > 0);
    options.algorithm = "two-shot";
    OK(warplink_collectives_join(comm, &options, &forced));
    OK(warplink_collectives_choice(forced, &made, &choice));
    HOLDS(strcmp(choice.path, "direct") == 0 && strcmp(choice.algorithm, "two-shot") == 0);
    made = call(WARPLINK_COLLECTIVE_KIND_ALL_GATHER, WARPLINK_REDUCE_OP_NONE, -1, COUNT);
    FAILS(warplink_collectives_choice(forced, &made, &choice), WARPLINK_STATUS_UNSUPPORTED,
        "algorithm two-shot does not support");
    FAILS(warplink_collectives_choice(forced, &made, NULL), WARPLINK_STATUS_UNSUPPORTED, "two-shot");
    OK(warplink_collectives_free(forced));
    options.algorithm = "chunks";
    OK(warplink_collectives_join(comm, &options, &forced));
    all_kinds(forced, stream, region);
    OK(warplink_collectives_free(forced));
}

/* All-gathers and all-to-alls of one memory, again and again, by the copy engine. */
static void bound(warplink_collectives open, warplink_stream stream, warplink_region region) {
    warplink_collective_options options = warplink_collective_options_default();
    warplink_collective_choice choice;
    warplink_collectives copying;
    warplink_bound_call call_of[2];
    warplink_collective_call made = call(WARPLINK_COLLECTIVE_KIND_ALL_GATHER, WARPLINK_REDUCE_OP_NONE, -1, COUNT);
    int32_t *words = (int32_t *)malloc(sizeof(int32_t) * COUNT * (size_t)size);
    void *address = NULL;
    HOLDS(words != NULL);
    OK(warplink_region_address(region, &address));
    int32_t *input = (int32_t *)address, *output = input + COUNT;
    options.algorithm = "copy-engine";
    OK(warplink_collectives_join(comm, &options, &copying));
    FAILS(warplink_collective(copying, &made, output, input, stream), WARPLINK_STATUS_UNSUPPORTED, "copy-engine does not support");
    OK(warplink_bind_collective(copying, &made, output, input, &call_of[0]));
    OK(warplink_bind_collective(open, &made, output, input, &call_of[1]));
    OK(warplink_bound_call_choice(call_of[0], &choice));
    HOLDS(strcmp(choice.path, "direct") == 0 && strcmp(choice.algorithm, "copy-engine") == 0);
    OK(warplink_bound_call_choice(call_of[1], &choice));
    HOLDS(strcmp(choice.algorithm, "copy-engine") != 0);
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < COUNT; i++) words[i] = number(rank, i) + round;
        OK(warplink_upload(span(region, 0, sizeof(int32_t) * COUNT), words));
        OK(warplink_barrier(comm));
        OK(warplink_bound_call_enqueue(call_of[round % 2], stream));
        OK(warplink_stream_synchronize(stream));
        OK(warplink_download(words, span(region, sizeof(int32_t) * COUNT, sizeof(int32_t) * COUNT * (uint64_t)size)));
        for (int i = 0; i < COUNT * size; i++) HOLDS(words[i] == number(i / COUNT, i % COUNT) + round);
        OK(warplink_barrier(comm));
    }
    FAILS(warplink_bind_collective(copying, &made, NULL, input, &call_of[0]), WARPLINK_STATUS_INVALID_ARGUMENT, "output is null");
    for (int i = 0; i < 2; i++) OK(warplink_bound_call_free(call_of[i]));
    FAILS(warplink_bound_call_enqueue(call_of[0], stream), WARPLINK_STATUS_CLOSED, "the bound call was freed");
    OK(warplink_collectives_free(copying));
    free(words);
}

/* An all-reduce of rows with a residual, RMSNorm and fp8 by blocks. */
static void fused(warplink_collectives collectives, warplink_stream stream, warplink_region region) {
    enum { TOKENS = 3, WIDTH = 200, BLOCKS = 2, FOURS = 13 };
    float words[TOKENS * WIDTH], scales[TOKENS * BLOCKS];
    unsigned char bytes[TOKENS * WIDTH / 2];
    const size_t scaled = 3 * sizeof words + sizeof(float) * WIDTH, last = scaled + 2 * sizeof words;
    const float squares = 0.25f * (float)((size * (size + 1) / 2 + 1) * (size * (size + 1) / 2 + 1));
    warplink_fused_call made = warplink_fused_call_default();
    void *address = NULL;
    OK(warplink_region_address(region, &address));
    float *input = (float *)address, *residual = input + TOKENS * WIDTH, *weight = residual + TOKENS * WIDTH;
    float *output = weight + WIDTH, *scale = output + TOKENS * WIDTH;
    /* Sums and residual are (1 + 2 + .. + size + 1) / 2, so that the norm is the weight. */
    for (int i = 0; i < TOKENS * WIDTH; i++) words[i] = 0.5f * (float)(rank + 1);
    OK(warplink_upload(span(region, 0, sizeof words), words));
    for (int i = 0; i < TOKENS * WIDTH; i++) words[i] = 0.5f;
    OK(warplink_upload(span(region, sizeof words, sizeof words), words));
    for (int i = 0; i < WIDTH; i++) words[i] = i < 128 ? 4.0f : -0.5f;
    OK(warplink_upload(span(region, 2 * sizeof words, sizeof(float) * WIDTH), words));
    made.norm = WARPLINK_NORM_RMS;
    made.quantization = WARPLINK_QUANTIZATION_PER_BLOCK;
    made.eps = 0;
    made.tokens = TOKENS;
    made.width = WIDTH;
    made.input = input;
    made.residual = residual;
    made.weight = weight;
    made.residual_out = residual;
    made.output = output;
    made.quantized = scale + 2 * TOKENS * BLOCKS;
    made.scale = scale;
    OK(warplink_fused_collective(collectives, &made, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(words, span(region, sizeof words, sizeof words)));
    for (int i = 0; i < TOKENS * WIDTH; i++) HOLDS(words[i] * words[i] == squares);
    OK(warplink_download(words, span(region, 2 * sizeof words + sizeof(float) * WIDTH, sizeof words)));
    for (int i = 0; i < TOKENS * WIDTH; i++) HOLDS(words[i] > 0 ? words[i] > 3.999f && words[i] < 4.001f : words[i] < -0.499f);
    OK(warplink_download(scales, span(region, 3 * sizeof words + sizeof(float) * WIDTH, sizeof scales)));
    for (int i = 0; i < TOKENS * BLOCKS; i++) {
        const float near = (i % BLOCKS == 0 ? 4.0f : 0.5f) / 448.0f;
        HOLDS(scales[i] > 0.999f * near && scales[i] < 1.001f * near);
    }
    made.wire = WARPLINK_WIRE_FP8;
    OK(warplink_fused_collective(collectives, &made, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(words, span(region, 2 * sizeof words + sizeof(float) * WIDTH, sizeof words)));
    for (int i = 0; i < TOKENS * WIDTH; i++) HOLDS(words[i] > 0 ? words[i] > 3.999f && words[i] < 4.001f : words[i] < -0.499f);
    made.wire = WARPLINK_WIRE_EXACT;
    made.quantization = WARPLINK_QUANTIZATION_NVFP4;
    FAILS(warplink_fused_collective(collectives, &made, stream), WARPLINK_STATUS_INVALID_ARGUMENT, "a global scale");
    /* Scales of 448 and 56 for 4 and 0.5, which become the largest float of 4 bits. */
    scales[0] = 448.0f * 6.0f / 4.0f;
    OK(warplink_upload(span(region, last, sizeof(float)), scales));
    made.global_scale = input + last / sizeof(float);
    OK(warplink_fused_collective(collectives, &made, stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(bytes, span(region, scaled, sizeof bytes)));
    for (int i = 0; i < TOKENS * FOURS; i++) HOLDS(bytes[i] == (i % FOURS < 8 ? 0x7e : 0x66));
    OK(warplink_download(bytes, span(region, scaled + sizeof(float) * 2 * TOKENS * BLOCKS, sizeof bytes)));
    for (int i = 0; i < TOKENS * WIDTH / 2; i++) HOLDS(bytes[i] == (i % (WIDTH / 2) < 64 ? 0x77 : 0xff));
    made.wire = 7;
    FAILS(warplink_fused_collective(collectives, &made, stream), WARPLINK_STATUS_INVALID_ARGUMENT, "warplink_wire");
    made.wire = WARPLINK_WIRE_EXACT;
    made.size -= 1;
    FAILS(warplink_fused_collective(collectives, &made, stream), WARPLINK_STATUS_INVALID_ARGUMENT, "start from");
    made.size += 1;
    made.norm = 7;
    FAILS(warplink_fused_collective(collectives, &made, stream), WARPLINK_STATUS_INVALID_ARGUMENT, "warplink_norm");
    made.norm = WARPLINK_NORM_NONE;
    FAILS(warplink_fused_collective(collectives, &made, stream), WARPLINK_STATUS_INVALID_ARGUMENT, "without a norm");
    made.norm = WARPLINK_NORM_RMS;
    made.output = residual;
    FAILS(warplink_fused_collective(collectives, &made, stream), WARPLINK_STATUS_INVALID_ARGUMENT, "overlaps");
}

/* By the vendor's library, and by a communicator of the library's that is there. It serves no ranks that share a GPU. */
static void by_the_library(warplink_stream stream, warplink_region region) {
    warplink_collective_options ways = warplink_collective_options_default();
    warplink_collectives collectives, adopted;
    warplink_collective_choice choice;
    const warplink_collective_call made = call(WARPLINK_COLLECTIVE_KIND_ALL_REDUCE, WARPLINK_REDUCE_OP_SUM, -1, COUNT);
    void *communicator = NULL;
    ways.path = "engine";
    if (share_gpus()) {
        library_refuses(comm, &ways);
        return;
    }
    OK(warplink_collectives_join(comm, &ways, &collectives));
    all_kinds(collectives, stream, region);
    OK(warplink_collectives_choice(collectives, &made, &choice));
    HOLDS(strcmp(choice.path, "engine") == 0 && choice.algorithm == NULL && choice.lanes == 0);
    OK(warplink_collectives_communicator(collectives, &ways.communicator));
    HOLDS(ways.communicator != NULL);
    OK(warplink_collectives_join(comm, &ways, &adopted));
    OK(warplink_collectives_communicator(adopted, &communicator));
    HOLDS(communicator == ways.communicator);
    all_kinds(adopted, stream, region);
    OK(warplink_collectives_free(adopted));
    all_kinds(collectives, stream, region);
    OK(warplink_collectives_free(collectives));
}

int main(int argc, char **argv) {
    warplink_options options = test_options();
    warplink_collectives collectives;
    warplink_stream stream;
    warplink_region region;
    void *memory = NULL, *communicator = NULL;
    HOLDS(argc > 3);
    rank = atoi(argv[1]);
    size = atoi(argv[2]);
    OK(warplink_init(&comm, size, argv[3], rank, &options));
    OK(warplink_alloc(comm, sizeof(int32_t) * COUNT * (size_t)(size + 4), &region));
    OK(warplink_region_address(region, &memory));
    OK(warplink_stream_create(comm, &stream));
    OK(warplink_collectives_join(comm, NULL, &collectives));
    OK(warplink_collectives_communicator(collectives, &communicator));
    HOLDS(communicator == NULL);
    all_kinds(collectives, stream, region);
    scaled(collectives, stream, region);
    misuse(collectives, stream, memory);
    chosen(collectives, stream, region);
    bound(collectives, stream, region);
    fused(collectives, stream, region);
    OK(warplink_collectives_free(collectives));
    {
        const warplink_collective_call made = call(WARPLINK_COLLECTIVE_KIND_BARRIER, WARPLINK_REDUCE_OP_NONE, -1, 0);
        FAILS(warplink_collective(collectives, &made, NULL, NULL, stream), WARPLINK_STATUS_CLOSED,
            "the group of collectives was freed");
    }
    by_the_library(stream, region);
    OK(warplink_destroy(comm));
    return 0;
}
