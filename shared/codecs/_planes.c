/* Splits words into planes of bytes and joins them again: the inner loops of shared/codecs/planes.py, which checks its input first.
 *
 * split(raw, *planes): plane i gets byte i of each word of raw, after the word is rotated left by one bit. The lowest byte is byte 0.
 * join(raw, *planes): the inverse.
 *
 * There are 2, 4 or 8 planes, one for each byte of a word. Words are little-endian. Both calls release the GIL and raise ValueError if a
 * length does not fit. Where this module could not be compiled, shared/codecs/planes_numpy.py stands in, at a fraction of the speed.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
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

enum { MOST_PLANES = 8 };

/* raw may have any alignment, so each word is copied by memcpy, which compilers turn into a load or a store. */
#define LOOPS(WORD, SPLIT, JOIN)                                                                    \
    VECTORIZED static void split_##WORD(const char *restrict raw, uint8_t **planes, size_t words)   \
    {                                                                                               \
        uint8_t *restrict p0 = planes[0], *restrict p1 = planes[1], *restrict p2 = planes[2];       \
        uint8_t *restrict p3 = planes[3], *restrict p4 = planes[4], *restrict p5 = planes[5];       \
        uint8_t *restrict p6 = planes[6], *restrict p7 = planes[7];                                 \
        (void)p2, (void)p3, (void)p4, (void)p5, (void)p6, (void)p7;                                 \
        for (size_t i = 0; i < words; i++) {                                                        \
            WORD word;                                                                              \
            memcpy(&word, raw + i * sizeof word, sizeof word);                                      \
            word = (WORD)(word << 1) | (WORD)(word >> (8 * sizeof word - 1));                       \
            SPLIT                                                                                   \
        }                                                                                           \
    }                                                                                               \
    VECTORIZED static void join_##WORD(char *restrict raw, uint8_t **planes, size_t words)          \
    {                                                                                               \
        const uint8_t *restrict p0 = planes[0], *restrict p1 = planes[1], *restrict p2 = planes[2]; \
        const uint8_t *restrict p3 = planes[3], *restrict p4 = planes[4], *restrict p5 = planes[5]; \
        const uint8_t *restrict p6 = planes[6], *restrict p7 = planes[7];                           \
        (void)p2, (void)p3, (void)p4, (void)p5, (void)p6, (void)p7;                                 \
        for (size_t i = 0; i < words; i++) {                                                        \
            WORD word = (WORD)(JOIN);                                                               \
            word = (WORD)(word >> 1) | (WORD)(word << (8 * sizeof word - 1));                       \
            memcpy(raw + i * sizeof word, &word, sizeof word);                                      \
        }                                                                                           \
    }

#define OUT(n) p##n[i] = (uint8_t)(word >> (8 * n));
#define IN(WORD, n) ((WORD)((WORD)p##n[i] << (8 * n)))
LOOPS(uint16_t, OUT(0) OUT(1), IN(uint16_t, 0) | IN(uint16_t, 1))
LOOPS(uint32_t, OUT(0) OUT(1) OUT(2) OUT(3), IN(uint32_t, 0) | IN(uint32_t, 1) | IN(uint32_t, 2) | IN(uint32_t, 3))
LOOPS(uint64_t, OUT(0) OUT(1) OUT(2) OUT(3) OUT(4) OUT(5) OUT(6) OUT(7),
      IN(uint64_t, 0) | IN(uint64_t, 1) | IN(uint64_t, 2) | IN(uint64_t, 3) | IN(uint64_t, 4) | IN(uint64_t, 5) | IN(uint64_t, 6) |
          IN(uint64_t, 7))

/* Runs split or join on the arguments (raw, plane 0, plane 1, ...). */
static PyObject *run(PyObject *args, int splitting)
{
    Py_buffer buffers[1 + MOST_PLANES];
    uint8_t *planes[MOST_PLANES] = {0};
    Py_ssize_t taken = 0, width = PyTuple_Size(args) - 1;
    PyObject *result = NULL;

    if (width != 2 && width != 4 && width != 8) {
        PyErr_SetString(PyExc_ValueError, "expected the words and 2, 4 or 8 planes");
        return NULL;
    }
    for (; taken <= width; taken++) {
        int written = splitting == (taken > 0);
        if (PyObject_GetBuffer(PyTuple_GetItem(args, taken), &buffers[taken], written ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto done;
        if (taken > 0)
            planes[taken - 1] = buffers[taken].buf;
    }
    size_t words = (size_t)(buffers[0].len / width);
    for (Py_ssize_t plane = 0; plane <= width; plane++) {
        if ((size_t)buffers[plane].len != (plane ? words : words * (size_t)width)) {
            PyErr_SetString(PyExc_ValueError, "expected whole words, and one byte for each word in each plane");
            goto done;
        }
    }
    char *raw = buffers[0].buf;
    Py_BEGIN_ALLOW_THREADS
    if (width == 2)
        splitting ? split_uint16_t(raw, planes, words) : join_uint16_t(raw, planes, words);
    else if (width == 4)
        splitting ? split_uint32_t(raw, planes, words) : join_uint32_t(raw, planes, words);
    else
        splitting ? split_uint64_t(raw, planes, words) : join_uint64_t(raw, planes, words);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    while (taken > 0)
        PyBuffer_Release(&buffers[--taken]);
    return result;
}

static PyObject *split(PyObject *Py_UNUSED(module), PyObject *args)
{
    return run(args, 1);
}

static PyObject *join(PyObject *Py_UNUSED(module), PyObject *args)
{
    return run(args, 0);
}

static PyMethodDef methods[] = {
    {"split", split, METH_VARARGS, "split(raw, *planes)\n\nSplit the words of raw into planes."},
    {"join", join, METH_VARARGS, "join(raw, *planes)\n\nFill raw with the words whose planes are given."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_planes", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__planes(void)
{
    return PyModuleDef_Init(&definition);
}
