/* Subtracts and adds words: the inner loops of shared/codecs/delta.py, which checks its input first.
 *
 * subtract(raw, base, width): replaces each word of base by its delta word (FORMAT.md, section 3), and returns how many are not 0.
 * pack(words, width, gaps): moves the words that are not 0 to the front of words, in their order, and writes their places into gaps.
 *     Returns how many bytes of gaps it has written, or -1 if gaps has no room for them.
 * add(raw, words, width): adds each delta word to the word of raw at the same place.
 * scatter(piece, first, width, places, words, gaps, words, gaps, ...): the same for the packed words of up to 64 deltas that belong to a piece
 *     of the chunk, which begins at the word `first`. The pieces of a chunk are given in their order. places: 24 bytes for each delta, zero before the
 *     first piece, which say how far it has been added. Returns True if each word of each delta has found its place in the pieces so far.
 *
 * A word has 1, 2, 4 or 8 bytes and is little-endian. All calls release the GIL and raise ValueError if a length does not fit. Where
 * this module could not be compiled, shared/codecs/delta_numpy.py stands in, at a fraction of the speed.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the loops read words of a little-endian machine"
#endif

/* Each loop is compiled twice, and the faster version that the processor can run is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define VECTORIZED
#endif

/* The gap byte that passes over as many words and places none. */
enum { PASS = 255 };
/* So many words are counted in a variable of their own size, which keeps the vectors full, and cannot overflow in 8 bits. */
enum { FEW = 128 };

/* So many words are looked at together, one bit for each. */
enum { BLOCK = 64 };
/* Multiplied by it, 8 bytes that are 0 or 1 become 8 bits in the highest byte, the first byte in the lowest bit. */
#define BITS_OF_BYTES 0x0102040810204080ull
#define LOWEST_BIT(bits) ((size_t)__builtin_ctzll(bits))

/* The packed words of one delta and their gaps, and how far they have been added. */
struct delta {
    const char *packed;
    const uint8_t *gaps;
    size_t listed, length, passed, place, taken;
};
/* So many bytes at the end of it say how far a delta has been added. */
enum { PLACES = 3 * sizeof(size_t) };
/* So many bytes of a chunk are finished before the next ones, so that they stay in the cache of a core. */
enum { TILE = 1 << 16, MOST_DELTAS = 64 };

/* Inverts all bits below the highest one if that is set: the way from a difference to its delta word, and back. */
#define FOLD(WORD, word) ((WORD)((word) ^ ((WORD)(0 - ((word) >> (8 * sizeof(WORD) - 1))) >> 1)))

/* Buffers may have any alignment, so each word is copied by memcpy, which compilers turn into a load or a store. */
#define LOAD(WORD, name, buffer, i) WORD name; memcpy(&name, (buffer) + (i) * sizeof(WORD), sizeof(WORD))
#define STORE(name, buffer, i) memcpy((buffer) + (i) * sizeof(name), &name, sizeof(name))

#define LOOPS(WORD)                                                                                              \
    VECTORIZED static size_t subtract_##WORD(const char *restrict raw, char *restrict base, size_t words)        \
    {                                                                                                            \
        size_t found = 0;                                                                                        \
        for (size_t start = 0; start < words; start += FEW) {                                                    \
            size_t end = words - start < FEW ? words : start + FEW;                                              \
            WORD some = 0;                                                                                       \
            for (size_t i = start; i < end; i++) {                                                               \
                LOAD(WORD, newer, raw, i);                                                                       \
                LOAD(WORD, older, base, i);                                                                      \
                WORD word = (WORD)(newer - older);                                                               \
                word = FOLD(WORD, word);                                                                         \
                some = (WORD)(some + (word != 0));                                                               \
                STORE(word, base, i);                                                                            \
            }                                                                                                    \
            found += some;                                                                                       \
        }                                                                                                        \
        return found;                                                                                            \
    }                                                                                                            \
    VECTORIZED static void add_##WORD(char *restrict raw, const char *restrict packed, size_t words)             \
    {                                                                                                            \
        for (size_t i = 0; i < words; i++) {                                                                     \
            LOAD(WORD, older, raw, i);                                                                           \
            LOAD(WORD, word, packed, i);                                                                         \
            word = (WORD)(older + FOLD(WORD, word));                                                             \
            STORE(word, raw, i);                                                                                 \
        }                                                                                                        \
    }                                                                                                            \
    VECTORIZED static uint64_t listed_##WORD(const char *packed, size_t words)                                   \
    {                                                                                                            \
        uint8_t differs[BLOCK] = {0};                                                                            \
        uint64_t listed = 0;                                                                                     \
        for (size_t i = 0; i < words; i++) {                                                                     \
            LOAD(WORD, word, packed, i);                                                                         \
            differs[i] = word != 0;                                                                              \
        }                                                                                                        \
        for (size_t i = 0; i < BLOCK; i += 8) {                                                                  \
            uint64_t eight;                                                                                      \
            memcpy(&eight, differs + i, sizeof eight);                                                           \
            listed |= (eight * BITS_OF_BYTES >> 56) << i;                                                        \
        }                                                                                                        \
        return listed;                                                                                           \
    }                                                                                                            \
    static Py_ssize_t pack_##WORD(char *packed, size_t words, uint8_t *gaps, size_t room)                        \
    {                                                                                                            \
        size_t next = 0, written = 0, taken = 0;                                                                 \
        for (size_t start = 0; start < words; start += BLOCK) {                                                  \
            size_t length = words - start < BLOCK ? words - start : BLOCK;                                       \
            uint64_t listed = listed_##WORD(packed + start * sizeof(WORD), length);                              \
            for (; listed; listed &= listed - 1) {                                                               \
                size_t place = start + LOWEST_BIT(listed), gap = place - next;                                   \
                for (; gap >= PASS; gap -= PASS) {                                                               \
                    if (written == room)                                                                         \
                        return -1;                                                                               \
                    gaps[written++] = PASS;                                                                      \
                }                                                                                                \
                if (written == room)                                                                             \
                    return -1;                                                                                   \
                gaps[written++] = (uint8_t)gap;                                                                  \
                LOAD(WORD, word, packed, place);                                                                 \
                STORE(word, packed, taken);                                                                      \
                taken++;                                                                                         \
                next = place + 1;                                                                                \
            }                                                                                                    \
        }                                                                                                        \
        return (Py_ssize_t)written;                                                                              \
    }                                                                                                            \
    static void scatter_##WORD(char *restrict raw, size_t first, size_t words, struct delta *deltas, size_t count)\
    {                                                                                                            \
        for (size_t start = first, behind = first + words; start < behind; start += TILE / sizeof(WORD)) {       \
            size_t end = behind - start < TILE / sizeof(WORD) ? behind : start + TILE / sizeof(WORD);            \
            for (struct delta *delta = deltas; delta < deltas + count; delta++) {                                \
                const uint8_t *gaps = delta->gaps;                                                               \
                size_t i = delta->passed, place = delta->place, taken = delta->taken;                            \
                for (; i < delta->length; i++) {                                                                 \
                    if (gaps[i] == PASS) {                                                                       \
                        place += PASS;                                                                           \
                        continue;                                                                                \
                    }                                                                                            \
                    if (place + gaps[i] >= end || taken == delta->listed)                                        \
                        break;                                                                                   \
                    place += gaps[i];                                                                            \
                    LOAD(WORD, older, raw, place - first);                                                       \
                    LOAD(WORD, word, delta->packed, taken);                                                      \
                    word = (WORD)(older + FOLD(WORD, word));                                                     \
                    STORE(word, raw, place - first);                                                             \
                    place++;                                                                                     \
                    taken++;                                                                                     \
                }                                                                                                \
                delta->passed = i, delta->place = place, delta->taken = taken;                                   \
            }                                                                                                    \
        }                                                                                                        \
    }

LOOPS(uint8_t)
LOOPS(uint16_t)
LOOPS(uint32_t)
LOOPS(uint64_t)

/* Calls the loop for words of `width` bytes, without the GIL. */
#define BY_WIDTH(result, loop, ...)                                                                              \
    Py_BEGIN_ALLOW_THREADS                                                                                       \
    switch (width) {                                                                                             \
    case 1: result loop##_uint8_t(__VA_ARGS__); break;                                                           \
    case 2: result loop##_uint16_t(__VA_ARGS__); break;                                                          \
    case 4: result loop##_uint32_t(__VA_ARGS__); break;                                                          \
    default: result loop##_uint64_t(__VA_ARGS__); break;                                                         \
    }                                                                                                            \
    Py_END_ALLOW_THREADS

/* Raises ValueError and returns 0 unless the width is known and all lengths fit. */
static int fits(int width, int sound)
{
    if ((width == 1 || width == 2 || width == 4 || width == 8) && sound)
        return 1;
    PyErr_SetString(PyExc_ValueError, "expected whole words of 1, 2, 4 or 8 bytes, and buffers of one length");
    return 0;
}

/* Returns whether a delta that has been added so far has its next word at the word `first` of the chunk, or behind it. */
static int is_at(const struct delta *delta, size_t first)
{
    if (delta->passed > delta->length || delta->taken > delta->listed || delta->place > SIZE_MAX / 2)
        return 0;
    return delta->place >= first || delta->passed == delta->length || delta->taken == delta->listed ||
           (delta->gaps[delta->passed] != PASS && delta->place + delta->gaps[delta->passed] >= first);
}

static PyObject *subtract(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer raw, base;
    int width;
    size_t found = 0;
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(args, "y*w*i", &raw, &base, &width))
        return NULL;
    if (fits(width, raw.len == base.len && (width < 1 || raw.len % width == 0))) {
        BY_WIDTH(found =, subtract, raw.buf, base.buf, (size_t)(raw.len / width))
        result = PyLong_FromSize_t(found);
    }
    PyBuffer_Release(&raw);
    PyBuffer_Release(&base);
    return result;
}

static PyObject *pack(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer words, gaps;
    int width;
    Py_ssize_t written = 0;
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(args, "w*iw*", &words, &width, &gaps))
        return NULL;
    if (fits(width, width < 1 || words.len % width == 0)) {
        BY_WIDTH(written =, pack, words.buf, (size_t)(words.len / width), gaps.buf, (size_t)gaps.len)
        result = PyLong_FromSsize_t(written);
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&gaps);
    return result;
}

static PyObject *add(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer raw, words;
    int width;
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(args, "w*y*i", &raw, &words, &width))
        return NULL;
    if (fits(width, raw.len == words.len && (width < 1 || raw.len % width == 0))) {
        BY_WIDTH(, add, raw.buf, words.buf, (size_t)(raw.len / width))
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&raw);
    PyBuffer_Release(&words);
    return result;
}

/* Runs scatter on the arguments (piece, first word, width, places, packed words, gaps, packed words, gaps, ...). */
static PyObject *scatter(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { BEFORE = 4 };
    struct delta deltas[MOST_DELTAS];
    Py_buffer buffers[2 + 2 * MOST_DELTAS];
    Py_ssize_t taken = 0, count = (PyTuple_Size(args) - BEFORE) / 2;
    PyObject *result = NULL;

    if (PyTuple_Size(args) < BEFORE || PyTuple_Size(args) % 2 || count > MOST_DELTAS) {
        PyErr_SetString(PyExc_ValueError, "expected a piece, its first word, a width, places, and packed words and gaps of at most 64 deltas");
        return NULL;
    }
    size_t first = PyLong_AsSize_t(PyTuple_GetItem(args, 1));
    int width = (int)PyLong_AsLong(PyTuple_GetItem(args, 2));
    if (PyErr_Occurred())
        return NULL;
    for (; taken < 2 + 2 * count; taken++) { /* the piece, the places, and those of the deltas */
        PyObject *object = PyTuple_GetItem(args, taken == 0 ? 0 : taken + 2);
        if (PyObject_GetBuffer(object, &buffers[taken], taken < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto done;
    }
    char *piece = buffers[0].buf, *places = buffers[1].buf;
    int sound = buffers[1].len == count * PLACES && first <= SIZE_MAX / 2 && (width < 1 || buffers[0].len % width == 0);
    for (Py_ssize_t i = 0; i < count && sound; i++) {
        Py_buffer *packed = &buffers[2 + 2 * i], *gaps = packed + 1;
        struct delta *delta = &deltas[i];
        delta->packed = packed->buf, delta->gaps = gaps->buf;
        delta->listed = width < 1 ? 0 : (size_t)(packed->len / width), delta->length = (size_t)gaps->len;
        memcpy(&delta->passed, places + i * PLACES, PLACES);
        sound = is_at(delta, first) && (width < 1 || packed->len % width == 0);
    }
    if (!fits(width, sound))
        goto done;
    size_t words = (size_t)(buffers[0].len / width);
    BY_WIDTH(, scatter, piece, first, words, deltas, (size_t)count)
    for (Py_ssize_t i = 0; i < count; i++) {
        memcpy(places + i * PLACES, &deltas[i].passed, PLACES);
        sound &= deltas[i].passed == deltas[i].length && deltas[i].taken == deltas[i].listed && deltas[i].place <= first + words;
    }
    result = PyBool_FromLong(sound);
done:
    while (taken > 0)
        PyBuffer_Release(&buffers[--taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"subtract", subtract, METH_VARARGS, "subtract(raw, base, width)\n\nReplace the words of base by delta words."},
    {"pack", pack, METH_VARARGS, "pack(words, width, gaps)\n\nMove the words that are not 0 to the front."},
    {"add", add, METH_VARARGS, "add(raw, words, width)\n\nAdd delta words to the words of raw."},
    {"scatter", scatter, METH_VARARGS, "scatter(piece, first, width, places, *words_and_gaps)\n\nAdd packed delta words to a piece of a chunk."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_delta", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__delta(void)
{
    return PyModuleDef_Init(&definition);
}
