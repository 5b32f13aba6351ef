/* Compresses bytes by Huffman codes alone: the entropy coder of shared/codecs/planes.py.
 *
 * compress(plane, frame): writes a frame of zstd (RFC 8878) that decodes to plane, and returns its length, or -1 if frame has no room for it.
 *
 * Each block of the frame has literals in four streams, and no matches. So every decoder of zstd reads it, while no time is spent on looking
 * for matches, which numbers do not have. The call releases the GIL. Where this module could not be compiled, zstd's own encoder stands in,
 * at half of the speed.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the streams are written as words of a little-endian machine"
#endif

/* The loop is compiled twice, and the faster version that the processor can run is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FAST_SHIFTS __attribute__((target_clones("bmi2", "default")))
#else
#define FAST_SHIFTS
#endif

/* The longest code of the format, the bytes of a block, and the bytes of a group of blocks, which share their codes. */
enum { MOST_BITS = 11, BLOCK = 1 << 17, GROUP = 1 << 19, STREAMS = 4 };
/* A shorter block is stored as it is. Of a group that is longer than FEW, one line of bytes in eight is counted. */
enum { LEAST_BLOCK = 1 << 9, FEW = 1 << 15, LINE = 64, ONE_IN = 8, NEAR = 8 };
/* The most bytes of a stream of a block, with the 8 bytes that the last store may write behind it. */
enum { STREAM_ROOM = (BLOCK / STREAMS) * MOST_BITS / 8 + 16 };
/* The cells of the table that codes the lengths, and the bits of their number. */
enum { CELL_BITS = 6, CELLS = 1 << CELL_BITS };
/* The longest description of the codes: a length byte and as many bytes as it can name. */
enum { TREE_ROOM = 128 };

/* The code of a byte in the highest bits of an entry, and its number of bits in the lowest. MISSED says that the byte has no code. */
#define MISSED 0x100u

struct coder {
    uint32_t counts[256];
    uint8_t bits[256];
    uint64_t entries[256];
    uint8_t tree[TREE_ROOM];
    size_t tree_length;
    uint8_t streams[STREAMS][STREAM_ROOM];
};

static unsigned highest_bit(uint32_t number)
{
    return 31u - (unsigned)__builtin_clz(number);
}

/* Adds the bytes to the counts, or one line in `one_in`. Each time another of the lines is drawn, since columns of a tensor may repeat. */
static void count(const uint8_t *bytes, size_t length, uint32_t one_in, uint32_t *counts)
{
    uint32_t found[STREAMS][256] = {{0}};
    size_t start = 0;
    for (uint32_t number = 0; start + (size_t)LINE * one_in <= length; start += (size_t)LINE * one_in, number++) {
        const uint8_t *line = bytes + start + (number * 2654435761u >> 16) % one_in * LINE;
        for (int i = 0; i < LINE; i += 8) {
            uint64_t eight;
            memcpy(&eight, line + i, sizeof eight);
            for (int byte = 0; byte < 8; byte++, eight >>= 8)
                found[byte % STREAMS][eight & 255]++;
        }
    }
    for (; start < length; start++)
        found[0][bytes[start]]++;
    for (int byte = 0; byte < 256; byte++)
        counts[byte] += found[0][byte] + found[1][byte] + found[2][byte] + found[3][byte];
}

/* Counts the bytes of a group. A longer group is sampled. Bytes near those that were found get a code, too: they are likely to be in the
 * rest. So do bytes that had one before. */
static void count_group(const uint8_t *group, size_t length, uint32_t *counts)
{
    uint32_t found[256] = {0};
    count(group, length, length > FEW ? ONE_IN : 1, found);
    for (int byte = 0; byte < 256; byte++)
        counts[byte] = found[byte] ? found[byte] : counts[byte] != 0;
    for (int byte = 0; byte < 256 && length > FEW; byte++)
        for (int near = -NEAR; near <= NEAR && found[byte]; near++)
            counts[(byte + near) & 255] += !counts[(byte + near) & 255];
}

/* Finds the lengths of the codes of all bytes that have counts, at least two. The codes use up all words of MOST_BITS bits. */
static void find_lengths(const uint32_t *counts, uint8_t *bits)
{
    uint64_t sorted[256]; /* the count of a byte, and the byte in the lowest 8 bits */
    uint64_t weights[512];
    uint16_t parents[512];
    int leaves = 0;
    for (int byte = 0; byte < 256; byte++) {
        bits[byte] = 0;
        if (!counts[byte])
            continue;
        uint64_t one = (uint64_t)counts[byte] << 8 | (uint64_t)byte;
        int at = leaves++;
        for (; at > 0 && sorted[at - 1] > one; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = one;
    }
    for (int i = 0; i < leaves; i++)
        weights[i] = sorted[i] >> 8;
    /* Two queues: the leaves, and the nodes made of two lighter ones, both in the order of their weights. */
    int nodes = leaves, leaf = 0, node = leaves;
    for (; nodes < 2 * leaves - 1; nodes++) {
        weights[nodes] = 0;
        for (int side = 0; side < 2; side++) {
            int least = leaf < leaves && (node == nodes || weights[leaf] <= weights[node]) ? leaf++ : node++;
            weights[nodes] += weights[least];
            parents[least] = (uint16_t)nodes;
        }
    }
    uint8_t depths[512];
    depths[nodes - 1] = 0;
    int32_t room = 1 << MOST_BITS; /* the words of MOST_BITS bits that no code begins */
    for (int i = nodes - 2; i >= 0; i--) {
        depths[i] = (uint8_t)(depths[parents[i]] + 1);
        if (i < leaves) {
            uint8_t length = depths[i] < MOST_BITS ? depths[i] : MOST_BITS;
            bits[sorted[i] & 255] = length;
            room -= 1 << (MOST_BITS - length);
        }
    }
    /* Codes that were cut take too many words. The bytes that lose least for each word that they give take longer codes. */
    while (room < 0) {
        int least = -1;
        for (int i = 0; i < leaves; i++) {
            uint8_t length = bits[sorted[i] & 255];
            if (length < MOST_BITS && (least < 0 || weights[i] << length < weights[least] << bits[sorted[least] & 255]))
                least = i;
        }
        room += 1 << (MOST_BITS - ++bits[sorted[least] & 255]);
    }
    /* Words that are left go to the most frequent bytes that can use them. A code of the longest length takes one. */
    while (room > 0)
        for (int i = leaves - 1; i >= 0; i--) {
            int32_t wanted = 1 << (MOST_BITS - bits[sorted[i] & 255]);
            if (wanted <= room) {
                room -= wanted;
                bits[sorted[i] & 255]--;
            }
        }
}

struct bit_writer {
    uint64_t held;
    unsigned length;
    uint8_t *at;
};

/* Appends up to 16 bits. */
static void put(struct bit_writer *out, uint32_t value, unsigned bits)
{
    out->held |= (uint64_t)value << out->length;
    for (out->length += bits; out->length >= 8; out->length -= 8, out->held >>= 8)
        *out->at++ = (uint8_t)out->held;
}

static void put_rest(struct bit_writer *out)
{
    if (out->length)
        *out->at++ = (uint8_t)out->held;
    out->length = 0, out->held = 0;
}

/* Writes the weights of the bytes, coded by a table of CELLS cells (RFC 8878, sections 4.1 and 4.2.1.2), and returns their length. */
static size_t write_weights(const uint8_t *weights, int number, uint8_t *to)
{
    int most = 0, counts[MOST_BITS + 2] = {0}, shares[MOST_BITS + 2], left = CELLS, most_frequent = 0;
    for (int i = 0; i < number; i++) {
        counts[weights[i]]++;
        most = weights[i] > most ? weights[i] : most;
    }
    for (int weight = 0; weight <= most; weight++) {
        shares[weight] = counts[weight] * CELLS / number;
        shares[weight] += !shares[weight];
        left -= shares[weight];
        most_frequent = counts[weight] > counts[most_frequent] ? weight : most_frequent;
    }
    shares[most_frequent] += left;

    struct bit_writer out = {0, 0, to};
    put(&out, CELL_BITS - 5, 4);
    int rest = CELLS + 1, threshold = CELLS;
    unsigned width = CELL_BITS + 1;
    for (int weight = 0; weight <= most && rest > 1; weight++) {
        int value = shares[weight] + 1, spare = 2 * threshold - 1 - rest;
        rest -= shares[weight];
        value += value >= threshold ? spare : 0;
        put(&out, (uint32_t)value, width - (value < spare));
        for (; rest < threshold; threshold >>= 1)
            width--;
    }
    put_rest(&out);

    uint8_t cells[CELLS];
    uint16_t states[CELLS], next[MOST_BITS + 2];
    int32_t find_state[MOST_BITS + 2];
    uint32_t bits_base[MOST_BITS + 2];
    for (int weight = 0, at = 0, total = 0; weight <= most; weight++) {
        for (int i = 0; i < shares[weight]; i++, at = (at + (CELLS >> 1) + (CELLS >> 3) + 3) % CELLS)
            cells[at] = (uint8_t)weight;
        next[weight] = (uint16_t)total;
        unsigned widest = shares[weight] == 1 ? CELL_BITS : CELL_BITS - highest_bit((uint32_t)shares[weight] - 1);
        bits_base[weight] = (widest << 16) - ((uint32_t)shares[weight] << widest);
        find_state[weight] = total - shares[weight];
        total += shares[weight];
    }
    for (int cell = 0; cell < CELLS; cell++)
        states[next[cells[cell]]++] = (uint16_t)(CELLS + cell);

    /* Two states take turns, from the last weight to the first. A state starts with the cell of its first weight that needs the fewest bits. */
    uint32_t state[2] = {0, 0};
    for (int i = number - 1; i >= 0; i--) {
        uint32_t base = bits_base[weights[i]], *one = &state[i % 2], bits;
        if (i >= number - 2) {
            bits = (base + (1 << 15)) >> 16;
            *one = (bits << 16) - base;
        } else {
            bits = (*one + base) >> 16;
            put(&out, *one & ((1u << bits) - 1), bits);
        }
        *one = states[(int32_t)(*one >> bits) + find_state[weights[i]]];
    }
    put(&out, state[1] % CELLS, CELL_BITS);
    put(&out, state[0] % CELLS, CELL_BITS);
    put(&out, 1, 1);
    put_rest(&out);
    return (size_t)(out.at - to);
}

/* Makes the codes of all bytes that have counts, and their description. Returns 0 if they cannot be described. */
static int make_codes(struct coder *coder)
{
    int last = 0, found = 0;
    for (int byte = 0; byte < 256; byte++)
        if (coder->counts[byte])
            last = byte, found++;
    if (found < 2) { /* a code has at least one bit */
        coder->counts[last ^ 1]++;
        last |= 1;
    }
    find_lengths(coder->counts, coder->bits);
    unsigned longest = 0;
    for (int byte = 0; byte < 256; byte++)
        longest = coder->bits[byte] > longest ? coder->bits[byte] : longest;
    uint32_t starts[MOST_BITS + 2] = {0}, of_length[MOST_BITS + 2] = {0};
    for (int byte = 0; byte < 256; byte++)
        of_length[coder->bits[byte]]++;
    for (unsigned length = longest, start = 0; length > 0; length--) {
        starts[length] = start;
        start = (start + of_length[length]) >> 1;
    }
    uint8_t weights[256];
    for (int byte = 0; byte < 256; byte++) {
        unsigned length = coder->bits[byte];
        coder->entries[byte] = length ? (uint64_t)starts[length]++ << (64 - length) | length : MISSED;
        weights[byte] = (uint8_t)(length ? longest + 1 - length : 0);
    }
    /* The weight of the last byte follows from the others. */
    if (last <= 128) {
        coder->tree[0] = (uint8_t)(127 + last);
        weights[last] = 0;
        for (int i = 0; i < last; i += 2)
            coder->tree[1 + i / 2] = (uint8_t)(weights[i] << 4 | weights[i + 1]);
        coder->tree_length = 1 + ((size_t)last + 1) / 2;
        return 1;
    }
    uint8_t description[4 * TREE_ROOM];
    size_t length = write_weights(weights, last, description);
    if (length >= TREE_ROOM)
        return 0;
    coder->tree[0] = (uint8_t)length;
    memcpy(coder->tree + 1, description, length);
    coder->tree_length = 1 + length;
    return 1;
}

/* Adds the code of a byte to a stream, whose newest bits are the highest of `held`. The lowest byte of `length` is the number of bits; its
 * other bits only say whether a byte was MISSED. */
#define ADD(s, byte)                                      \
    do {                                                  \
        uint64_t entry = entries[byte];                   \
        held##s = held##s >> (entry & 63) | entry;        \
        length##s += entry;                               \
    } while (0)
#define FLUSH(s)                                             \
    do {                                                     \
        missed |= length##s;                                 \
        uint64_t ready = held##s >> (-length##s & 63);       \
        memcpy(to##s, &ready, sizeof ready);                 \
        to##s += (length##s & 255) >> 3;                     \
        length##s &= 7;                                      \
    } while (0)
#define END(s, place)                                              \
    do {                                                           \
        held##s = held##s >> 1 | 1ull << 63;                       \
        length##s++;                                               \
        FLUSH(s);                                                  \
        *(place) = (size_t)(to##s - start##s) + (length##s > 0);   \
    } while (0)

/* Codes two streams of a block, each from its last byte to its first, and sets their lengths. They take turns, because a code can only be
 * added once the one before is. Returns 0 if a byte has no code. */
FAST_SHIFTS static int code_two(const uint64_t *restrict entries, const uint8_t *restrict from0, size_t count0, const uint8_t *restrict from1,
                                size_t count1, uint8_t *restrict start0, uint8_t *restrict start1, size_t *lengths)
{
    uint8_t *restrict to0 = start0, *restrict to1 = start1;
    uint64_t held0 = 0, length0 = 0, held1 = 0, length1 = 0, missed = 0;
    size_t i = (count0 < count1 ? count0 : count1) / 4 * 4;
    for (; count0 > i; count0--) {
        ADD(0, from0[count0 - 1]);
        FLUSH(0);
    }
    for (; count1 > i; count1--) {
        ADD(1, from1[count1 - 1]);
        FLUSH(1);
    }
    for (; i > 0; i -= 4) {
        ADD(0, from0[i - 1]);
        ADD(1, from1[i - 1]);
        ADD(0, from0[i - 2]);
        ADD(1, from1[i - 2]);
        ADD(0, from0[i - 3]);
        ADD(1, from1[i - 3]);
        ADD(0, from0[i - 4]);
        ADD(1, from1[i - 4]);
        FLUSH(0);
        FLUSH(1);
    }
    END(0, lengths);
    END(1, lengths + 1);
    return (missed & 0xff00) == 0;
}

static int code_streams(struct coder *coder, const uint8_t *block, size_t length, size_t *lengths)
{
    size_t quarter = (length + 3) / 4;
    return code_two(coder->entries, block, quarter, block + quarter, quarter, coder->streams[0], coder->streams[1], lengths) &&
           code_two(coder->entries, block + 2 * quarter, quarter, block + 3 * quarter, length - 3 * quarter, coder->streams[2],
                    coder->streams[3], lengths + 2);
}

/* Writes a number of `bytes` bytes and returns the place behind it. */
static uint8_t *write_number(uint8_t *to, uint64_t number, int bytes)
{
    for (; bytes > 0; bytes--, number >>= 8)
        *to++ = (uint8_t)number;
    return to;
}

/* Writes the frame, and returns its length, or -1 if it has no room. */
static Py_ssize_t write_frame(struct coder *coder, const uint8_t *plane, size_t length, uint8_t *frame, size_t room)
{
    uint8_t *to = frame, *end = frame + room;
    int described = 0; /* whether an earlier block of the frame has the description of the codes */
    if (room < 9 || length > UINT32_MAX)
        return -1;
    to = write_number(to, 0xFD2FB528u, 4);
    *to++ = 2 << 6 | 1 << 5; /* a single segment, whose length has 4 bytes */
    to = write_number(to, length, 4);
    for (size_t start = 0; start < length || length == 0; start += BLOCK) {
        const uint8_t *block = plane + start;
        size_t rest = length - start, size = rest < BLOCK ? rest : BLOCK, lengths[STREAMS], body = size;
        int coded = size >= LEAST_BLOCK;
        if (start % GROUP == 0 && coded) {
            size_t group = rest < GROUP ? rest : GROUP;
            count_group(block, group, coder->counts);
            described = 0, coded = make_codes(coder);
        }
        if (coded && !code_streams(coder, block, size, lengths)) {
            count(block, size, 1, coder->counts);
            described = 0, coded = make_codes(coder) && code_streams(coder, block, size, lengths);
        }
        if (coded) {
            body = 5 + (described ? 0 : coder->tree_length) + 6 + lengths[0] + lengths[1] + lengths[2] + lengths[3] + 1;
            coded = body < size;
        }
        body = coded ? body : size;
        if ((size_t)(end - to) < 3 + body)
            return -1;
        to = write_number(to, (rest == size) | (coded ? 2 << 1 : 0) | (uint64_t)body << 3, 3);
        if (!coded) {
            memcpy(to, block, size);
            to += size;
        } else {
            uint64_t literals = body - 5 - 1;
            to = write_number(to, (uint64_t)(described ? 3 : 2) | 3 << 2 | (uint64_t)size << 4 | literals << 22, 5);
            if (!described) {
                memcpy(to, coder->tree, coder->tree_length);
                to += coder->tree_length;
                described = 1;
            }
            for (int stream = 0; stream < STREAMS - 1; stream++)
                to = write_number(to, lengths[stream], 2);
            for (int stream = 0; stream < STREAMS; stream++) {
                memcpy(to, coder->streams[stream], lengths[stream]);
                to += lengths[stream];
            }
            *to++ = 0; /* no sequences */
        }
        if (length == 0)
            break;
    }
    return to - frame;
}

static PyObject *compress(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer plane, frame;
    Py_ssize_t written = -1;
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(args, "y*w*", &plane, &frame))
        return NULL;
    struct coder *coder = malloc(sizeof *coder);
    if (coder == NULL) {
        PyErr_NoMemory();
    } else {
        memset(coder->counts, 0, sizeof coder->counts);
        Py_BEGIN_ALLOW_THREADS
        written = write_frame(coder, plane.buf, (size_t)plane.len, frame.buf, (size_t)frame.len);
        Py_END_ALLOW_THREADS
        free(coder);
        result = PyLong_FromSsize_t(written);
    }
    PyBuffer_Release(&plane);
    PyBuffer_Release(&frame);
    return result;
}

static PyMethodDef methods[] = {
    {"compress", compress, METH_VARARGS, "compress(plane, frame)\n\nCompress bytes by Huffman codes into a frame of zstd."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_huffman", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__huffman(void)
{
    return PyModuleDef_Init(&definition);
}
