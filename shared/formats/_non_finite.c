/* Counts words by a pattern of bits: the inner loop of shared/formats/non_finite.py.
 *
 * count(raw, width, mask, pattern): the number of words of raw, each of `width` bytes (1, 2, 4 or 8), whose bits under `mask` are
 * `pattern`. Words are little-endian; bytes after the last whole word do not count. The call releases the GIL, and raises ValueError
 * for another width. Where this module could not be compiled, NumPy counts, at a fraction of the speed.
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

/* So few words are counted in a variable of their own size, which keeps the vectors full, and cannot overflow in 8 bits. */
enum { FEW = 128 };

/* raw may have any alignment, so each word is copied by memcpy, which compilers turn into a load. */
#define LOOP(WORD)                                                                        \
    VECTORIZED static uint64_t count_##WORD(const char *raw, size_t words, WORD mask, WORD pattern) \
    {                                                                                     \
        uint64_t found = 0;                                                               \
        for (size_t start = 0; start < words; start += FEW) {                             \
            size_t end = words - start < FEW ? words : start + FEW;                       \
            WORD some = 0;                                                                \
            for (size_t i = start; i < end; i++) {                                        \
                WORD word;                                                                \
                memcpy(&word, raw + i * sizeof word, sizeof word);                        \
                some = (WORD)(some + ((WORD)(word & mask) == pattern));                   \
            }                                                                             \
            found += some;                                                                \
        }                                                                                 \
        return found;                                                                     \
    }

LOOP(uint8_t)
LOOP(uint16_t)
LOOP(uint32_t)
LOOP(uint64_t)

static PyObject *count(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer raw;
    int width;
    unsigned long long mask, pattern;
    uint64_t found = 0;

    if (!PyArg_ParseTuple(args, "y*iKK", &raw, &width, &mask, &pattern))
        return NULL;
    if (width != 1 && width != 2 && width != 4 && width != 8) {
        PyBuffer_Release(&raw);
        return PyErr_Format(PyExc_ValueError, "expected words of 1, 2, 4 or 8 bytes");
    }
    Py_BEGIN_ALLOW_THREADS
    size_t words = (size_t)raw.len / (size_t)width;
    if (width == 1)
        found = count_uint8_t(raw.buf, words, (uint8_t)mask, (uint8_t)pattern);
    else if (width == 2)
        found = count_uint16_t(raw.buf, words, (uint16_t)mask, (uint16_t)pattern);
    else if (width == 4)
        found = count_uint32_t(raw.buf, words, (uint32_t)mask, (uint32_t)pattern);
    else
        found = count_uint64_t(raw.buf, words, mask, pattern);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&raw);
    return PyLong_FromUnsignedLongLong(found);
}

static PyMethodDef methods[] = {
    {"count", count, METH_VARARGS, "count(raw, width, mask, pattern)\n\nCount the words that have these bits."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_non_finite", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__non_finite(void)
{
    return PyModuleDef_Init(&definition);
}
