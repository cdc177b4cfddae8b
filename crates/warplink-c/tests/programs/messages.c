/* One of several ranks that exchange messages and rows of experts. Arguments: rank, size, address. */

#include <time.h>
#include "check.h"

enum { ARENA = 4 << 20, GUARD = 48, GUARD_BYTE = 0x5a, MAX_RANKS = 8, TURNS = 5 };
enum { TOP_K = 2, EACH = 2, MAX_TOKENS = 16, ELEMENTS = 24 };

static warplink_comm comm;
static warplink_stream stream;
static warplink_region region;
static int32_t rank, size;
static uint64_t seed;
/* The region's address, what is in it, and what is expected in it. */
static uint8_t *base, *image, *expected;
static size_t used;

/* A number that all ranks know, for what is drawn in a turn. */
static uint64_t drawn(int what, int turn, int a, int b, int c) {
    uint64_t x = seed;
    int of[5];
    of[0] = what, of[1] = turn, of[2] = a, of[3] = b, of[4] = c;
    for (int i = 0; i < 5; i++) {
        x = (x ^ (uint64_t)(uint32_t)of[i]) * 0x9e3779b97f4a7c15u;
        x ^= x >> 29;
    }
    return x * 0xbf58476d1ce4e5b9u >> 16;
}

static void begin(void) {
    used = 0;
    memset(image, GUARD_BYTE, ARENA);
}

/* Where the next `bytes` bytes are in the arena, with a guard around them, aligned to 16 bytes plus `off`. */
static size_t room(size_t bytes, size_t off) {
    const size_t at = (used + GUARD + 15) / 16 * 16 + off;
    used = at + bytes + GUARD;
    HOLDS(used <= ARENA);
    return at;
}

static void upload(void) {
    OK(warplink_upload(span(region, 0, ARENA), image));
    memcpy(expected, image, ARENA);
}

/* Waits, and compares all of the arena. */
static void compare(const char *what, int turn) {
    OK(warplink_stream_synchronize(stream));
    OK(warplink_download(image, span(region, 0, ARENA)));
    if (memcmp(image, expected, ARENA) == 0) return;
    for (size_t at = 0; at < ARENA; at++) {
        if (image[at] == expected[at]) continue;
        fprintf(stderr, "%s, turn %d: byte %zu is %d; expected %d\n", what, turn, at, image[at], expected[at]);
        exit(1);
    }
}

static void fill(uint8_t *bytes, size_t count, uint64_t from) {
    for (size_t i = 0; i < count; i++) {
        from = from * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (uint8_t)(from >> 56);
    }
}

/* Up to two messages from each rank to each, some of them empty. */
static void groups(warplink_collectives collectives) {
    static const size_t lengths[] = {0, 1, 33, 5000, 70001};
    warplink_message all[4 * MAX_RANKS];
    for (int turn = 0; turn < TURNS; turn++) {
        size_t count = 0, places[4 * MAX_RANKS];
        uint64_t contents[4 * MAX_RANKS];
        begin();
        for (int peer = 0; peer < size; peer++) {
            for (int receives = 0; receives < 2; receives++) {
                const int from = receives ? peer : rank, to = receives ? rank : peer;
                const int here = (int)(drawn(1, turn, from, to, 0) % 3);
                for (int number = 0; number < here; number++) {
                    const size_t bytes = lengths[drawn(2, turn, from, to, number) % 5];
                    const size_t at = room(bytes, (size_t)(turn + receives) % 16);
                    contents[count] = drawn(3, turn, from, to, number);
                    if (!receives) fill(image + at, bytes, contents[count]);
                    places[count] = at;
                    all[count].peer = peer;
                    all[count].direction = receives ? WARPLINK_DIRECTION_RECEIVE : WARPLINK_DIRECTION_SEND;
                    all[count].memory = bytes == 0 ? NULL : base + at;
                    all[count].bytes = bytes;
                    count++;
                }
            }
        }
        upload();
        for (size_t i = 0; i < count; i++) {
            if (all[i].direction == WARPLINK_DIRECTION_RECEIVE) {
                fill(expected + places[i], (size_t)all[i].bytes, contents[i]);
            }
        }
        OK(warplink_send_receive(collectives, all, count, stream));
        compare("messages", turn);
    }
}

/* Parts of every length, one after the other or in another order with gaps. */
static void uneven(warplink_collectives collectives) {
    static const uint64_t lengths[] = {0, 1, 700, 9000};
    for (int turn = 0; turn < TURNS; turn++) {
        uint64_t sent[MAX_RANKS], received[MAX_RANKS], from[MAX_RANKS], to[MAX_RANKS];
        uint64_t all_sent = 0, all_received = 0;
        warplink_parts input_parts, output_parts;
        for (int i = 0; i < size; i++) {
            const int peer = turn % 2 ? size - 1 - i : i;
            sent[peer] = lengths[drawn(4, turn, rank, peer, 0) % 4];
            received[peer] = lengths[drawn(4, turn, peer, rank, 0) % 4];
            from[peer] = all_sent;
            to[peer] = all_received;
            all_sent += sent[peer] + (uint64_t)(turn % 2);
            all_received += received[peer] + (uint64_t)(turn % 2);
        }
        begin();
        const size_t input = room(4 * (size_t)all_sent, 0), output = room(4 * (size_t)all_received, 0);
        for (int peer = 0; peer < size; peer++) {
            fill(image + input + 4 * from[peer], 4 * (size_t)sent[peer], drawn(5, turn, rank, peer, 0));
        }
        upload();
        for (int peer = 0; peer < size; peer++) {
            fill(expected + output + 4 * to[peer], 4 * (size_t)received[peer], drawn(5, turn, peer, rank, 0));
        }
        input_parts.counts = sent;
        output_parts.counts = received;
        input_parts.displacements = turn % 2 ? from : NULL;
        output_parts.displacements = turn % 2 ? to : NULL;
        OK(warplink_all_to_all_v(collectives, WARPLINK_ELEMENT_TYPE_I32, base + output, output_parts, base + input,
            input_parts, stream));
        compare("all_to_all_v", turn);
    }
}

/* Parts of every length up to a limit, of which only the device knows how long they are. */
static void uneven_on_device(warplink_collectives collectives) {
    enum { MOST = 9001 };
    static const uint64_t lengths[] = {0, 1, 700, MOST};
    for (int turn = 0; turn < TURNS; turn++) {
        const size_t each = 4 * (size_t)MOST;
        begin();
        const size_t input = room(each * (size_t)size, 0), output = room(each * (size_t)size, 0);
        const size_t sent = room(8 * (size_t)size, 0), received = room(8 * (size_t)size, 0);
        for (int peer = 0; peer < size; peer++) {
            ((uint64_t *)(void *)(image + sent))[peer] = lengths[drawn(10, turn, rank, peer, 0) % 4];
            fill(image + input + each * (size_t)peer, each, drawn(11, turn, rank, peer, 0));
        }
        upload();
        for (int peer = 0; peer < size; peer++) {
            const uint64_t count = lengths[drawn(10, turn, peer, rank, 0) % 4];
            ((uint64_t *)(void *)(expected + received))[peer] = count;
            fill(expected + output + each * (size_t)peer, 4 * (size_t)count, drawn(11, turn, peer, rank, 0));
        }
        OK(warplink_all_to_all_v_on_device(collectives, WARPLINK_ELEMENT_TYPE_I32, base + output,
            (uint64_t *)(void *)(base + received), base + input, (const uint64_t *)(void *)(base + sent), MOST, stream));
        compare("all_to_all_v_on_device", turn);
    }
}

/* What rank `of` dispatches in a turn: how many tokens, the numbers of their experts, values and weights of which sums
   are exact. */
static int tokens_of(int of, int turn) { return (int)(drawn(6, turn, of, 0, 0) % (MAX_TOKENS + 1)); }

static int32_t expert_of(int of, int turn, int token, int slot) {
    return (int32_t)(drawn(7, turn, of, token, slot) % (uint64_t)(EACH * size + 1)) - 1;
}

static float value_of(int of, int turn, int token, int element) {
    return (float)((int)(drawn(8, turn, of, token, element) % 17) - 8);
}

static float weight_of(int of, int turn, int token, int slot) {
    return 0.5f * (float)(1 << drawn(9, turn, of, token, slot) % 3);
}

static void layers(warplink_collectives collectives, const warplink_expert_options *options) {
    warplink_experts layer;
    uint64_t rows = 0;
    OK(warplink_experts_create(collectives, options, &layer));
    OK(warplink_experts_max_rows(layer, &rows));
    /* A token may choose one expert in each slot. */
    HOLDS(rows == TOP_K * MAX_TOKENS);
    for (int turn = 0; turn < TURNS; turn++) {
        const int count = tokens_of(rank, turn);
        const size_t row = ELEMENTS * sizeof(float);
        warplink_dispatched dispatched;
        memset(&dispatched, 0, sizeof dispatched);
        warplink_tokens sent;
        memset(&sent, 0, sizeof sent);
        warplink_routing handle;
        begin();
        const size_t tokens = room((size_t)count * row, 0), output = room((size_t)count * row, 0);
        const size_t numbers = room((size_t)count * TOP_K * 4, 0), weights = room((size_t)count * TOP_K * 4, 0);
        const size_t came = room((size_t)size * rows * row, 0), locals = room((size_t)size * rows * 4, 0);
        const size_t counts = room((size_t)size * 4, 0);
        float *values = (float *)(void *)(image + tokens), *factors = (float *)(void *)(image + weights);
        int32_t *routing = (int32_t *)(void *)(image + numbers);
        dispatched.rows = base + came;
        dispatched.experts = (int32_t *)(void *)(base + locals);
        dispatched.counts = (int32_t *)(void *)(base + counts);
        for (int token = 0; token < count; token++) {
            for (int i = 0; i < ELEMENTS; i++) values[token * ELEMENTS + i] = value_of(rank, turn, token, i);
            for (int slot = 0; slot < TOP_K; slot++) {
                routing[token * TOP_K + slot] = expert_of(rank, turn, token, slot);
                factors[token * TOP_K + slot] = weight_of(rank, turn, token, slot);
            }
        }
        upload();
        for (int of = 0; of < size; of++) {
            int32_t next = 0;
            float *to = (float *)(void *)(expected + came) + (size_t)of * rows * ELEMENTS;
            int32_t *local = (int32_t *)(void *)(expected + locals) + (size_t)of * rows;
            for (int token = 0; token < tokens_of(of, turn); token++) {
                for (int slot = 0; slot < TOP_K; slot++) {
                    const int32_t expert = expert_of(of, turn, token, slot);
                    if (expert < 0 || expert / EACH != rank) continue;
                    for (int i = 0; i < ELEMENTS; i++) to[next * ELEMENTS + i] = value_of(of, turn, token, i);
                    local[next++] = expert % EACH;
                }
            }
            ((int32_t *)(void *)(expected + counts))[of] = next;
        }
        /* No memory where there are no tokens. */
        if (count > 0) {
            sent.rows = base + tokens;
            sent.numbers = (const int32_t *)(void *)(base + numbers);
            sent.count = (uint64_t)count;
        }
        OK(warplink_experts_dispatch(layer, &sent, &dispatched, &handle, stream));
        compare("dispatch", turn);

        /* Expert e multiplies by e + 1. */
        for (int of = 0; of < size; of++) {
            float *to = (float *)(void *)(image + came) + (size_t)of * rows * ELEMENTS;
            const int32_t *local = (const int32_t *)(const void *)(image + locals) + (size_t)of * rows;
            const int32_t here = ((const int32_t *)(const void *)(image + counts))[of];
            for (int32_t i = 0; i < here * ELEMENTS; i++) to[i] *= (float)(EACH * rank + local[i / ELEMENTS] + 1);
        }
        upload();
        for (int token = 0; token < count; token++) {
            for (int i = 0; i < ELEMENTS; i++) {
                float sum = 0;
                for (int slot = 0; slot < TOP_K; slot++) {
                    const int32_t expert = expert_of(rank, turn, token, slot);
                    if (expert < 0) continue;
                    sum += weight_of(rank, turn, token, slot) * (value_of(rank, turn, token, i) * (float)(expert + 1));
                }
                ((float *)(void *)(expected + output))[token * ELEMENTS + i] = sum;
            }
        }
        OK(warplink_experts_combine(layer, count > 0 ? base + output : NULL, base + came,
            (const float *)(void *)(base + weights), handle, stream));
        OK(warplink_routing_free(handle));
        FAILS(warplink_routing_free(handle), WARPLINK_STATUS_CLOSED, "the routing was freed");
        compare("combine", turn);
    }
    OK(warplink_experts_free(layer));
    FAILS(warplink_experts_max_rows(layer, &rows), WARPLINK_STATUS_CLOSED, "the layer of experts was freed");
}

static void misuse(warplink_collectives collectives, warplink_expert_options options) {
    const warplink_status invalid = WARPLINK_STATUS_INVALID_ARGUMENT;
    uint64_t counts[MAX_RANKS] = {0}, huge[MAX_RANKS] = {0};
    warplink_parts parts, wrong, none;
    warplink_message message;
    warplink_experts layer;
    warplink_dispatched dispatched;
    warplink_tokens sent;
    memset(&sent, 0, sizeof sent);
    warplink_routing handle = {0};
    message.peer = size;
    message.direction = WARPLINK_DIRECTION_SEND;
    message.memory = base;
    message.bytes = 8;
    FAILS(warplink_send_receive(collectives, NULL, 1, stream), invalid, "messages is null");
    FAILS(warplink_send_receive(collectives, &message, 1, stream), invalid, "is out of range");
    message.peer = -1;
    FAILS(warplink_send_receive(collectives, &message, 1, stream), invalid, "message 0: rank -1 is out of range");
    message.peer = 0;
    message.direction = 7;
    FAILS(warplink_send_receive(collectives, &message, 1, stream), invalid, "unknown direction 7");
    message.direction = WARPLINK_DIRECTION_RECEIVE;
    message.memory = NULL;
    FAILS(warplink_send_receive(collectives, &message, 1, stream), invalid, "messages[0].memory is null");
    OK(warplink_send_receive(collectives, NULL, 0, stream));

    counts[0] = 4;
    huge[0] = UINT64_MAX;
    parts.counts = counts;
    parts.displacements = NULL;
    wrong.counts = counts;
    wrong.displacements = huge;
    none.counts = NULL;
    none.displacements = NULL;
    FAILS(warplink_all_to_all_v(collectives, 99, base, parts, base, parts, stream), invalid, "unknown element type 99");
    FAILS(warplink_all_to_all_v(collectives, WARPLINK_ELEMENT_TYPE_F32, base, none, base, parts, stream), invalid,
        "output_parts.counts is null");
    FAILS(warplink_all_to_all_v(collectives, WARPLINK_ELEMENT_TYPE_F32, base, parts, base, wrong, stream), invalid,
        "input_parts: the part of rank 0 is more than memory can hold");
    FAILS(warplink_all_to_all_v(collectives, WARPLINK_ELEMENT_TYPE_F32, NULL, parts, base, parts, stream), invalid,
        "output is null");
    {
        uint64_t *words = (uint64_t *)(void *)base;
        FAILS(warplink_all_to_all_v_on_device(collectives, 99, base, words, base, words, 1, stream), invalid,
            "unknown element type 99");
        FAILS(warplink_all_to_all_v_on_device(collectives, WARPLINK_ELEMENT_TYPE_F32, base, words, base, words, UINT64_MAX,
            stream), invalid, "more than memory can hold");
        FAILS(warplink_all_to_all_v_on_device(collectives, WARPLINK_ELEMENT_TYPE_F32, base, NULL, base, words, 0, stream),
            invalid, "received is null");
        FAILS(warplink_all_to_all_v_on_device(collectives, WARPLINK_ELEMENT_TYPE_F32, base, words, base, words, 64, stream),
            invalid, "overlap");
    }

    options.experts = (uint64_t)size * EACH + 1;
    FAILS(warplink_experts_create(collectives, &options, &layer), invalid, "expected a multiple of the ranks");
    options.experts = (uint64_t)size * EACH;
    options.element_type = WARPLINK_ELEMENT_TYPE_I32;
    FAILS(warplink_experts_create(collectives, &options, &layer), invalid, "rows of i32");
    options.element_type = WARPLINK_ELEMENT_TYPE_F32;
    options.overflow = WARPLINK_OVERFLOW_FAIL;
    OK(warplink_experts_create(collectives, &options, &layer));
    memset(&dispatched, 0, sizeof dispatched);
    FAILS(warplink_experts_dispatch(layer, NULL, &dispatched, &handle, stream), invalid, "tokens is null");
    FAILS(warplink_experts_dispatch(layer, &sent, NULL, &handle, stream), invalid, "target is null");
    FAILS(warplink_experts_dispatch(layer, &sent, &dispatched, &handle, stream), invalid, "experts is null");
    dispatched.rows = base;
    dispatched.experts = (int32_t *)(void *)base;
    dispatched.counts = (int32_t *)(void *)base;
    sent.rows = base;
    sent.numbers = (const int32_t *)(void *)base;
    sent.count = MAX_TOKENS + 1;
    FAILS(warplink_experts_dispatch(layer, &sent, &dispatched, &handle, stream), invalid, "17 tokens; expected at most 16");
    sent.count = 1;
    FAILS(warplink_experts_dispatch(layer, &sent, &dispatched, NULL, stream), invalid, "routing is null");
    dispatched.dropped = (int32_t *)(void *)base;
    FAILS(warplink_experts_dispatch(layer, &sent, &dispatched, &handle, stream), invalid, "dropped rows are given");
    FAILS(warplink_experts_combine(layer, base, base, NULL, handle, stream), invalid, "the routing is zero");
    options.layout = 7;
    FAILS(warplink_experts_create(collectives, &options, &layer), invalid, "unknown layout 7");
    OK(warplink_experts_free(layer));
}

int main(int argc, char **argv) {
    warplink_options options = test_options();
    warplink_collective_options ways = warplink_collective_options_default();
    warplink_expert_options experts;
    warplink_collectives collectives;
    warplink_experts layer;
    void *memory = NULL;
    const char *path = NULL;
    uint64_t seeds[MAX_RANKS];
    HOLDS(argc > 3);
    rank = atoi(argv[1]);
    size = atoi(argv[2]);
    HOLDS(size <= MAX_RANKS);
    OK(warplink_init(&comm, size, argv[3], rank, &options));
    /* New data each time, that of rank 0 on all. */
    memset(seeds, 0, sizeof seeds);
    seeds[rank] = (uint64_t)time(NULL) * 1000003u + (uint64_t)(uintptr_t)&options;
    OK(warplink_all_gather(comm, seeds, sizeof seeds[0]));
    seed = seeds[0];
    fprintf(stderr, "the seed is %llu\n", (unsigned long long)seed);
    image = (uint8_t *)malloc(ARENA);
    expected = (uint8_t *)malloc(ARENA);
    HOLDS(image != NULL && expected != NULL);
    OK(warplink_alloc(comm, ARENA, &region));
    OK(warplink_region_address(region, &memory));
    base = (uint8_t *)memory;
    OK(warplink_stream_create(comm, &stream));

    memset(&experts, 0, sizeof experts);
    experts.experts = (uint64_t)size * EACH;
    experts.top_k = TOP_K;
    experts.max_tokens = MAX_TOKENS;
    experts.elements = ELEMENTS;
    experts.element_type = WARPLINK_ELEMENT_TYPE_F32;
    OK(warplink_collectives_join(comm, NULL, &collectives));
    misuse(collectives, experts);
    groups(collectives);
    uneven(collectives);
    uneven_on_device(collectives);
    layers(collectives, &experts);
    OK(warplink_collectives_message_path(collectives, &path));
    HOLDS(path != NULL && strcmp(path, "direct") == 0);
    OK(warplink_collectives_free(collectives));
    FAILS(warplink_send_receive(collectives, NULL, 0, stream), WARPLINK_STATUS_CLOSED,
        "the group of collectives was freed");

    /* By the library, which knows no experts, and serves no ranks that share a GPU. */
    ways.path = "engine";
    if (share_gpus()) {
        library_refuses(comm, &ways);
    } else {
        OK(warplink_collectives_join(comm, &ways, &collectives));
        groups(collectives);
        uneven(collectives);
        OK(warplink_collectives_message_path(collectives, &path));
        HOLDS(path != NULL && strcmp(path, "engine") == 0);
        FAILS(warplink_all_to_all_v_on_device(collectives, WARPLINK_ELEMENT_TYPE_I32, base, (uint64_t *)(void *)(base + 64),
            base + 128, (const uint64_t *)(void *)(base + 192), 0, stream), WARPLINK_STATUS_UNSUPPORTED,
            "cannot read counts from device memory");
        FAILS(warplink_experts_create(collectives, &experts, &layer), WARPLINK_STATUS_UNSUPPORTED,
            "cannot read counts from device memory");
        OK(warplink_collectives_free(collectives));
    }
    OK(warplink_destroy(comm));
    free(image);
    free(expected);
    return 0;
}
