/* Copies bytes and computes their checksums in one pass: the inner loop of agent/copy/checked_copy.py.
 * Digests samples of tensors: the inner loop of agent/copy/replica_samples.py.
 *
 * copy(targets, sources, lengths, ends, threads, crc): copy lengths[i] bytes from the address sources[i] to the address targets[i], for each i.
 * Return the crc32c (RFC 3720, section 12.1) of each part of these bytes, in their order. Part k ends where ends[k] bytes are copied. `crc` is
 * the crc32c of bytes before the first part that belong to it. A source may be its own target: then only the checksum is computed.
 *
 * The caller guarantees that the memory is there until the call returns. The GIL is released. Each part is the work of one thread.
 *
 * On x86-64 the bytes are written past the cache, because nobody reads them soon. An ordinary store of a line that is not in the cache first reads the
 * line from memory, which costs a third of the bandwidth.
 *
 * A crc32c is the remainder of a division of polynomials over GF(2). Bytes are loaded in vectors, and a vector that lies a fixed distance
 * behind is folded onto another by two carry-less products with constants, which does not change that remainder (Gopal et al., "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). Vectors of 32 bytes keep up with memory, and
 * vectors of 16 bytes are for older processors and for short pieces.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if !defined(__GNUC__) || !(defined(__x86_64__) || defined(__aarch64__) && defined(__AARCH64EL__))
#error "the copy is written for x86-64 and aarch64; elsewhere torch copies, and the daemon computes the checksums"
#endif

#ifdef __x86_64__
#include <immintrin.h>
#define BASE "sse4.2"
#define crc_word _mm_crc32_u64
#define crc_byte _mm_crc32_u8
#define keep_in_register(vector) __asm__ volatile("" : "+x"(vector))
#define finish_stores _mm_sfence
#else
#include <arm_acle.h>
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define BASE "+crc+crypto"
#define crc_word(reg, word) __crc32cd((uint32_t)(reg), word)
#define crc_byte __crc32cb
#define keep_in_register(vector) __asm__ volatile("" : "+w"(vector))
#define finish_stores() (void)0
#endif
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, WIDE = 256, NARROW = 64 }; /* bytes that are folded at once */
enum { MOST_THREADS = 64, LEAST_SHARE = 1 << 20 }; /* to start a thread takes as long as to copy LEAST_SHARE bytes */

typedef struct {
    char *target;
    const char *source;
    size_t length;
} Piece;

typedef struct {
    size_t piece, skipped; /* the part begins so many bytes behind the start of this piece */
    size_t length;
    uint32_t crc;
} Part;

typedef struct {
    const Piece *pieces;
    Part *parts;
    size_t count, nbytes, next;
} Work;

/* The factors that move a vector forward by so many bytes: x^(8 * bytes + 31) for its first half, and x^(8 * bytes - 33) for the second,
 * modulo the polynomial. Its bits are reflected: bit 0 of a register is x^31. */
static uint64_t of_wide[2], of_narrow[2];

__attribute__((target(BASE))) static void find_factors(uint64_t *factors, size_t bytes)
{
    uint64_t power = 1;
    for (size_t at = sizeof power; at < bytes; at += sizeof power)
        power = crc_word(power, 0); /* times x^64 */
    factors[1] = power;
    factors[0] = crc_word(power, 0);
}

/* Words at any address. A word is loaded once, so that its checksum is that of the bytes that are stored, even if another process changes the
 * source meanwhile. */
typedef uint64_t Word __attribute__((may_alias, aligned(1)));

static inline Word load(const char *place)
{
    return *(const volatile Word *)place;
}

#define INLINED __attribute__((target(BASE), always_inline)) static inline

/* Copies like `pass`, but through the cache. */
INLINED uint64_t pass_short(char *target, const char *source, size_t length, uint64_t reg, const int storing)
{
    size_t i = 0;
    for (; i + sizeof(Word) <= length; i += sizeof(Word)) {
        Word word = load(source + i);
        if (storing)
            *(Word *)(target + i) = word;
        reg = crc_word(reg, word);
    }
    for (; i < length; i++) {
        char byte = *(const volatile char *)(source + i);
        if (storing)
            target[i] = byte;
        reg = crc_byte((uint32_t)reg, (uint8_t)byte);
    }
    return reg;
}

/* Defines a function that copies as many whole steps of BYTES as there are, past the cache, and returns the number of these bytes. The target
 * begins at a line. Each load is kept in its register, so that no byte is loaded twice. */
#define FOLDING(name, features, BYTES, factors, Vector, load_vector, stream, xor, product, from_numbers, first)             \
    __attribute__((target(features))) static size_t name(char *target, const char *source, size_t length, uint64_t *reg, int storing) \
    {                                                                                                                        \
        enum { COUNT = BYTES / sizeof(Vector) };                                                                             \
        Vector folded[COUNT], by = from_numbers(factors);                                                                    \
        uint64_t words[BYTES / sizeof(uint64_t)], rest = 0;                                                                  \
        size_t at = 0;                                                                                                       \
        for (; at + BYTES <= length; at += BYTES) {                                                                          \
            _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; i++) {                                                        \
                Vector read = load_vector((const void *)(source + at + i * sizeof(Vector)));                                 \
                keep_in_register(read);                                                                                      \
                if (storing)                                                                                                 \
                    stream((void *)(target + at + i * sizeof(Vector)), read);                                                \
                if (at)                                                                                                      \
                    folded[i] = xor(xor(product(folded[i], by, 0x00), product(folded[i], by, 0x11)), read);                  \
                else                                                                                                         \
                    folded[i] = i ? read : xor(read, first(*reg));                                                           \
            }                                                                                                                \
        }                                                                                                                    \
        if (at) {                                                                                                            \
            memcpy(words, folded, sizeof words);                                                                             \
            for (size_t i = 0; i < sizeof words / sizeof *words; i++)                                                        \
                rest = crc_word(rest, words[i]);                                                                             \
            *reg = rest;                                                                                                     \
        }                                                                                                                    \
        return at;                                                                                                           \
    }

#ifdef __x86_64__
/* Whether this processor folds vectors of 32 bytes. */
static int is_wide;

#define TWICE(factors) _mm256_broadcastsi128_si256(ONCE(factors))
#define ONCE(factors) _mm_set_epi64x((long long)factors[1], (long long)factors[0])
#define FIRST_OF_TWO(reg) _mm256_set_epi64x(0, 0, 0, (long long)(reg))
#define FIRST_OF_ONE(reg) _mm_cvtsi64_si128((long long)(reg))

FOLDING(fold_wide, "avx2,vpclmulqdq," BASE, WIDE, of_wide, __m256i, _mm256_loadu_si256, _mm256_stream_si256, _mm256_xor_si256,
        _mm256_clmulepi64_epi128, TWICE, FIRST_OF_TWO)
FOLDING(fold_narrow, "pclmul," BASE, NARROW, of_narrow, __m128i, _mm_loadu_si128, _mm_stream_si128, _mm_xor_si128, _mm_clmulepi64_si128, ONCE,
        FIRST_OF_ONE)

static int is_able(void)
{
    is_wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}
#else
enum { is_wide = 0 };
#define fold_wide fold_narrow

/* The product of the first halves for `halves` 0x00, of the second for 0x11. */
INLINED uint64x2_t product(uint64x2_t a, uint64x2_t b, const int halves)
{
    return vreinterpretq_u64_p128(halves ? vmull_high_p64(vreinterpretq_p64_u64(a), vreinterpretq_p64_u64(b))
                                         : vmull_p64((poly64_t)vgetq_lane_u64(a, 0), (poly64_t)vgetq_lane_u64(b, 0)));
}

/* These processors write whole lines without reading them first, once they see that all of them are written. */
#define LOAD(place) vreinterpretq_u64_u8(vld1q_u8(place))
#define STORE(place, vector) vst1q_u8(place, vreinterpretq_u8_u64(vector))
#define PAIR(factors) vld1q_u64(factors)
#define FIRST(reg) vsetq_lane_u64(reg, vdupq_n_u64(0), 0)

FOLDING(fold_narrow, BASE, NARROW, of_narrow, uint64x2_t, LOAD, STORE, veorq_u64, product, PAIR, FIRST)

static int is_able(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) && (getauxval(AT_HWCAP) & HWCAP_PMULL);
}
#endif

/* Copies, and returns the register of the crc32c behind these bytes. With `storing` 0, nothing is stored. */
INLINED uint64_t pass(char *target, const char *source, size_t length, uint64_t reg, const int storing)
{
    size_t at = -(uintptr_t)target % LINE;
    if (at > length)
        at = length;
    reg = pass_short(target, source, at, reg, storing);
    if (is_wide)
        at += fold_wide(target + at, source + at, length - at, &reg, storing);
    at += fold_narrow(target + at, source + at, length - at, &reg, storing);
    return pass_short(target + at, source + at, length - at, reg, storing);
}

__attribute__((target(BASE))) static uint64_t copy_piece(char *target, const char *source, size_t length, uint64_t reg)
{
    return target == source ? pass(target, source, length, reg, 0) : pass(target, source, length, reg, 1);
}

static void copy_part(const Piece *piece, Part *part)
{
    size_t skipped = part->skipped, left = part->length;
    uint64_t reg = (uint32_t)~part->crc;
    piece += part->piece;
    while (left) {
        size_t length = piece->length - skipped < left ? piece->length - skipped : left;
        reg = copy_piece(piece->target + skipped, piece->source + skipped, length, reg);
        left -= length;
        skipped = 0;
        piece++;
    }
    part->crc = (uint32_t)~reg;
}

static void *copy_parts(void *argument)
{
    Work *work = argument;
    size_t number;
    while ((number = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count)
        copy_part(work->pieces, &work->parts[number]);
    finish_stores();
    return NULL;
}

/* Runs the work on so many threads, the calling thread among them. Signals stay with the threads of the caller, except those of a fault. */
static void share_out(Work *work, long threads)
{
    pthread_t started[MOST_THREADS];
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t all, before;
    long count = 0;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if ((size_t)threads > work->nbytes / LEAST_SHARE)
        threads = (long)(work->nbytes / LEAST_SHARE);
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (count + 1 < threads && (size_t)(count + 1) < work->count && pthread_create(&started[count], NULL, copy_parts, work) == 0)
        count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    copy_parts(work);
    while (count > 0)
        pthread_join(started[--count], NULL);
}

static int numbers_of(PyObject *list, size_t *found, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        found[i] = PyLong_AsSize_t(PyList_GetItem(list, i));
        if (found[i] == (size_t)-1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Divides the pieces into parts. Returns -1 if the ends do not ascend to the total length. */
static int divide(const Piece *pieces, Py_ssize_t count, const size_t *ends, Part *parts, Py_ssize_t parts_count)
{
    size_t piece = 0, begin = 0, end = 0; /* the piece has the bytes [begin, end) of all */
    size_t at = 0;
    if (count)
        end = pieces[0].length;
    for (Py_ssize_t i = 0; i < parts_count; i++) {
        if (ends[i] < at)
            return -1;
        while (at >= end && piece + 1 < (size_t)count) {
            begin = end;
            end += pieces[++piece].length;
        }
        parts[i] = (Part){piece, at - begin, ends[i] - at, 0};
        at = ends[i];
    }
    while (piece + 1 < (size_t)count)
        end += pieces[++piece].length;
    return at == end ? 0 : -1;
}

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *targets, *sources, *lengths, *ends, *result = NULL;
    unsigned long threads, crc;
    if (!PyArg_ParseTuple(args, "O!O!O!O!kk", &PyList_Type, &targets, &PyList_Type, &sources, &PyList_Type, &lengths, &PyList_Type, &ends,
                          &threads, &crc))
        return NULL;
    Py_ssize_t count = PyList_Size(lengths), parts_count = PyList_Size(ends);
    if (PyList_Size(targets) != count || PyList_Size(sources) != count) {
        PyErr_SetString(PyExc_ValueError, "expected as many targets and sources as lengths");
        return NULL;
    }
    size_t *numbers = PyMem_Calloc((size_t)(3 * count + parts_count + 1), sizeof *numbers);
    Piece *pieces = PyMem_Calloc((size_t)count + 1, sizeof *pieces);
    Part *parts = PyMem_Calloc((size_t)parts_count + 1, sizeof *parts);
    if (!numbers || !pieces || !parts) {
        PyErr_NoMemory();
        goto done;
    }
    size_t *of_ends = numbers + 3 * count;
    if (numbers_of(targets, numbers, count) < 0 || numbers_of(sources, numbers + count, count) < 0 ||
        numbers_of(lengths, numbers + 2 * count, count) < 0 || numbers_of(ends, of_ends, parts_count) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        pieces[i] = (Piece){(char *)numbers[i], (const char *)numbers[count + i], numbers[2 * count + i]};
        if (pieces[i].length && (!pieces[i].target || !pieces[i].source)) {
            PyErr_SetString(PyExc_ValueError, "expected addresses of memory");
            goto done;
        }
    }
    if (divide(pieces, count, of_ends, parts, parts_count) < 0) {
        PyErr_SetString(PyExc_ValueError, "expected ends that ascend to the sum of the lengths");
        goto done;
    }
    parts[0].crc = (uint32_t)crc;
    Work work = {pieces, parts, (size_t)parts_count, parts_count ? of_ends[parts_count - 1] : 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share_out(&work, (long)threads);
    Py_END_ALLOW_THREADS
    result = PyList_New(parts_count);
    for (Py_ssize_t i = 0; result && i < parts_count; i++) {
        PyObject *value = PyLong_FromUnsignedLong(parts[i].crc);
        if (!value || PyList_SetItem(result, i, value) < 0)
            Py_CLEAR(result);
    }
done:
    PyMem_Free(numbers);
    PyMem_Free(pieces);
    PyMem_Free(parts);
    return result;
}

/* The finalizer of MurmurHash3. */
static inline uint64_t mixed(uint64_t number)
{
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCDu;
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53u;
    return number ^ number >> 33;
}

/* AHEAD: the number of lines that are fetched while earlier ones are digested, because nearly every line
 * is a cache miss. */
enum { AHEAD = 24, MOST_BYTES = 128 };

/* Replaces the address of each tensor by that of its piece. Computes the same as `_Pieces.offsets` of
 * replica_samples.py does for tensors of which one piece each is sampled. */
static PyObject *choose_pieces(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer starts, seeds, room;
    unsigned long long salt;
    if (!PyArg_ParseTuple(args, "w*y*y*K", &starts, &seeds, &room, &salt))
        return NULL;
    uint64_t *places = starts.buf;
    const uint64_t *of_seed = seeds.buf, *of_room = room.buf;
    int sound = starts.len == seeds.len && starts.len == room.len;
    for (Py_ssize_t i = 0; sound && i < starts.len / (Py_ssize_t)sizeof *places; i++)
        if (of_room[i])
            places[i] += mixed(of_seed[i] + salt) % of_room[i];
    PyBuffer_Release(&starts);
    PyBuffer_Release(&seeds);
    PyBuffer_Release(&room);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "expected as many seeds and rooms as starts");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *digest_pieces(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer addresses, factors, digests;
    Py_ssize_t width;
    if (!PyArg_ParseTuple(args, "y*ny*w*", &addresses, &width, &factors, &digests))
        return NULL;
    const uint64_t *of_word = factors.buf, *places = addresses.buf;
    uint64_t *found = digests.buf;
    Py_ssize_t count = addresses.len / (Py_ssize_t)sizeof *places;
    int sound = width > 0 && width <= MOST_BYTES && factors.len >= (width + 7) / 8 * 8 && digests.len == addresses.len;
    for (Py_ssize_t i = 0; sound && i < count; i++) {
        const char *piece = (const char *)places[i];
        uint64_t sum = (uint64_t)width;
        if (i + AHEAD < count) {
            __builtin_prefetch((const char *)places[i + AHEAD]);
            __builtin_prefetch((const char *)places[i + AHEAD] + width - 1);
        }
        for (Py_ssize_t at = 0; at < width; at += 8) {
            uint64_t word = 0;
            memcpy(&word, piece + at, (size_t)(width - at < 8 ? width - at : 8));
            sum += word * of_word[at / 8];
        }
        found[i] = mixed(sum);
    }
    PyBuffer_Release(&addresses);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&digests);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "expected a width of 1 to 128 bytes, a factor for each word and room for each digest");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"choose_pieces", choose_pieces, METH_VARARGS, "choose_pieces(starts, seeds, room, salt)\n\nAdd the place of a piece to each start."},
    {"digest_pieces", digest_pieces, METH_VARARGS,
     "digest_pieces(addresses, width, factors, digests)\n\nDigest `width` bytes at each address into `digests`."},
    {"copy", copy, METH_VARARGS, "copy(targets, sources, lengths, ends, threads, crc)\n\nCopy bytes, and return the crc32c of each part."},
    {NULL, NULL, 0, NULL},
};

static int check_processor(PyObject *Py_UNUSED(module))
{
    if (!is_able()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no instructions for a crc32c");
        return -1;
    }
    find_factors(of_wide, WIDE); /* the same at each import, even if another thread copies meanwhile */
    find_factors(of_narrow, NARROW);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, check_processor}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_checked_copy", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__checked_copy(void)
{
    return PyModuleDef_Init(&definition);
}
