// Reads checkpoints as FORMAT.md describes them, without any code of ckptd: `node reader.js DIRECTORY...`, which prints a line of JSON for each:
// {"state": STATE}, or {"refused": WHY}.
//
// It checks every digest and checksum on the way, and reads chunks of all codecs, also deltas and linked files. Tensors become nested lists, bytes
// become {"bytes": hex}, and integers that a number of JavaScript cannot hold become text.

"use strict";
const crypto = require("crypto");
const fs = require("fs");
const path = require("path");
const { unzstd } = require("./zstd.js");

const ALIGN = 4096;
const FEATURES = ["files", "linked-files", "deltas"];
const HEADER_BODY = 184, TRAILER = 64, TRAILER_BODY = 60;

function fail(why) {
  throw new Error(why);
}

// -- checksums

const TABLE = new Uint32Array(256).map((_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0x82f63b78 : n >>> 1;
  return n >>> 0;
});

function crc32c(data) {
  let crc = 0xffffffff;
  for (const byte of data) crc = TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

function sha256(data) {
  return crypto.createHash("sha256").update(data).digest("hex");
}

// -- msgpack

class Ext {
  constructor(code, data) {
    Object.assign(this, { code, data });
  }
}

function decode(data) {
  let at = 0;
  const take = (length) => {
    if (at + length > data.length) fail("a msgpack document is cut short");
    at += length;
    return data.subarray(at - length, at);
  };
  const uint = (length) => Number(take(length).readUIntBE(0, length));
  const whole = (big) => (Number.isSafeInteger(Number(big)) ? Number(big) : big.toString());
  const text = (length) => take(length).toString("utf8");
  const list = (length) => Array.from({ length }, value);
  const map = (length) => new Map(Array.from({ length }, () => [value(), value()]));
  const ext = (length) => {
    const code = take(1).readInt8(0);
    return new Ext(code, take(length));
  };
  function value() {
    const kind = uint(1);
    if (kind < 0x80) return kind;
    if (kind < 0x90) return map(kind & 15);
    if (kind < 0xa0) return list(kind & 15);
    if (kind < 0xc0) return text(kind & 31);
    if (kind >= 0xe0) return kind - 256;
    const more = {
      0xc0: () => null, 0xc2: () => false, 0xc3: () => true, 0xc4: () => take(uint(1)), 0xc5: () => take(uint(2)), 0xc6: () => take(uint(4)),
      0xc7: () => ext(uint(1)), 0xc8: () => ext(uint(2)), 0xc9: () => ext(uint(4)), 0xca: () => take(4).readFloatBE(0),
      0xcb: () => take(8).readDoubleBE(0), 0xcc: () => uint(1), 0xcd: () => uint(2), 0xce: () => uint(4),
      0xcf: () => whole(take(8).readBigUInt64BE(0)), 0xd0: () => take(1).readInt8(0), 0xd1: () => take(2).readInt16BE(0),
      0xd2: () => take(4).readInt32BE(0), 0xd3: () => whole(take(8).readBigInt64BE(0)), 0xd4: () => ext(1), 0xd5: () => ext(2), 0xd6: () => ext(4),
      0xd7: () => ext(8), 0xd8: () => ext(16), 0xd9: () => text(uint(1)), 0xda: () => text(uint(2)), 0xdb: () => text(uint(4)),
      0xdc: () => list(uint(2)), 0xdd: () => list(uint(4)), 0xde: () => map(uint(2)), 0xdf: () => map(uint(4)),
    }[kind];
    return more ? more() : fail(`a msgpack document has the byte ${kind}`);
  }
  const found = value();
  return at === data.length ? found : fail("a msgpack document has bytes at its end");
}

// -- stored forms of chunks

const RAW = 0, ZSTD = 1, PLANES = 2, DELTA = 3;
const CHUNK_WINDOW = 8388608, PLANE_WINDOW = 131072;
const DELTA_HEAD = 16, SKIP = 255;

// The bytes of the words of a chunk, by the size of its elements.
function wordBytes(elementSize) {
  return { 2: 2, 4: 4, 8: 8, 16: 8 }[elementSize] || 1;
}

function fromPlanes(stored, length, width) {
  const words = length / width, raw = Buffer.alloc(length);
  if (stored.length < 8 * width) fail("planes are cut short");
  let at = 8 * width;
  for (let n = 0; n < width; n++) {
    const method = stored.readUInt32LE(8 * n), end = at + stored.readUInt32LE(8 * n + 4);
    if (method > 1 || end > stored.length) fail("a plane has an unknown method, or ends behind its chunk");
    const plane = method === 1 ? unzstd(stored.subarray(at, end), words, PLANE_WINDOW) : stored.subarray(at, end);
    if (plane.length !== words) fail("a plane has not one byte for each word");
    for (let word = 0; word < words; word++) raw[word * width + n] = plane[word];
    at = end;
  }
  if (at !== stored.length) fail("planes do not take the length of their chunk");
  if (width > 1) raw.forEach((_, n) => n % width === 0 && rotateRight(raw, n, width));
  return raw;
}

function rotateRight(raw, at, width) {
  const lowest = raw[at] & 1;
  for (let n = at; n < at + width; n++) raw[n] = (raw[n] >> 1) | ((n + 1 < at + width ? raw[n + 1] & 1 : lowest) << 7);
}

function decodeStored(stored, codec, length, elementSize) {
  if (codec === RAW) return stored.length === length ? stored : fail("stored bytes have another length than the raw bytes");
  if (codec === ZSTD) return unzstd(stored, length, CHUNK_WINDOW);
  return fromPlanes(stored, length, wordBytes(elementSize));
}

// Calls `place` with the number of each word that a delta lists.
function eachListed(gaps, listed, words, place) {
  let word = 0, placed = 0;
  for (const gap of gaps) {
    word += gap;
    if (word > words || (gap < SKIP && (word === words || placed === listed))) fail("the gaps of a delta place words beyond its end");
    if (gap < SKIP) {
      place(word++);
      placed++;
    }
  }
  if (placed !== listed) fail("the gaps of a delta place fewer words than it lists");
}

// Adds the delta words of a delta to the words of its base, in place.
function addDelta(stored, raw, elementSize) {
  const width = wordBytes(elementSize), words = raw.length / width;
  if (stored.length < DELTA_HEAD) fail("a delta is cut short");
  const [listed, codec, gapBytes, gapsStored] = [0, 4, 8, 12].map((at) => stored.readUInt32LE(at)), end = DELTA_HEAD + gapsStored;
  if (listed > words || (codec !== RAW && codec !== PLANES)) fail("a delta lists too many words, or with an unknown codec");
  if (gapBytes > words || gapsStored > gapBytes || end > stored.length) fail("a delta has more gap bytes than it can have");
  if (listed === 0 && stored.length > DELTA_HEAD) fail("a delta without a listed word has bytes at its end");
  if ((listed === 0 || listed === words) && (gapBytes || gapsStored)) fail("a delta that needs no gap bytes has some");
  if (listed === 0) return;
  const packed = stored.subarray(DELTA_HEAD, end), gaps = gapsStored === gapBytes ? packed : unzstd(packed, gapBytes, PLANE_WINDOW);
  const deltas = decodeStored(stored.subarray(end), codec, listed * width, elementSize);
  let from = 0;
  const add = (word) => {
    const flip = deltas[from + width - 1] & 0x80 ? 0xff : 0;
    let carry = 0;
    for (let n = 0; n < width; n++) {
      carry += raw[word * width + n] + (deltas[from + n] ^ (n === width - 1 ? flip & 0x7f : flip));
      raw[word * width + n] = carry & 0xff;
      carry >>= 8;
    }
    from += width;
  };
  if (listed < words) eachListed(gaps, listed, words, add);
  else for (let word = 0; word < words; word++) add(word);
}

// -- part files

const FILES = 1, LINKED = 2, BASES = 4;
const MOST_STORED = 16777216, MOST_DELTAS = 64;

function checked(data, magic, body, features) {
  if (data.subarray(0, 8).toString("latin1") !== magic) fail(`a header does not begin with ${magic}`);
  if (crc32c(data.subarray(0, body)) !== data.readUInt32LE(body)) fail(`the header ${magic} does not match its checksum`);
  if (data.readUInt16LE(8) !== 1 || data.readUInt32LE(12) & ~features) fail("written by a newer ckptd");
}

function headerOf(index, features, nonce, number, step) {
  const header = Buffer.alloc(ALIGN);
  header.write("CKPTDPRT", "latin1");
  header.writeUInt16LE(1, 8);
  header.writeUInt32LE(features, 12);
  nonce.copy(header, 16);
  [index.get("attempt"), index.get("rank"), index.get("world_size"), number].forEach((field, n) => header.writeUInt32LE(field, 32 + 4 * n));
  header.writeBigUInt64LE(step === null ? 0xffffffffffffffffn : BigInt(step), 48);
  header.write(index.get("job"), 56, "utf8");
  header.writeUInt32LE(crc32c(header.subarray(0, HEADER_BODY)), HEADER_BODY);
  return header;
}

// The files of a part by their numbers, after their headers were compared with what the index demands.
function openFiles(directory, name, file, index, linked) {
  const lengths = index.get("files") || [], bases = index.get("bases") || [], nonce = file.subarray(16, 32), step = index.get("step");
  const features = (lengths.length && FILES) | (linked.size && LINKED) | (bases.length && BASES);
  if (!headerOf(index, features, nonce, 0, step).equals(file.subarray(0, ALIGN))) fail("the header of a part does not match its index");
  return [file, ...lengths.map((length, n) => {
    const number = n + 1, other = name.replace(/\.ckpt$/, `.${String(number).padStart(4, "0")}.ckpt`);
    const data = fs.readFileSync(path.join(directory, other)), link = linked.get(number);
    if (data.length !== length || length < ALIGN) fail(`${other} is not as long as the index says`);
    if (link) checked(data, "CKPTDPRT", HEADER_BODY, FILES | LINKED | BASES);
    const header = link ? headerOf(index, data.readUInt32LE(12), ...link) : headerOf(index, FILES, nonce, number, step);
    return header.equals(data.subarray(0, ALIGN)) ? data : fail(`${other} belongs to another part`);
  })];
}

// Refuses chunks and bases that contradict each other. The places of bases count from 1.
function checkDeltas(chunks, bases, based, files, linked) {
  const chains = [0];
  if (based.length !== (bases.length ? chunks.length : 0)) fail("`based` has not one number for each chunk");
  const chain = (codec, base, limit) => {
    if (base >= limit || (codec === DELTA) !== (base > 0)) fail("a chunk or a base has a base that it may not have");
    if (codec > DELTA) fail("written by a newer ckptd: it has an unknown codec");
    return codec === DELTA ? chains[base] + 1 : 0;
  };
  bases.forEach(([number, at, length, codec, , , base], n) => {
    if (!linked.has(number)) fail("a base is not in a linked file");
    if (at % ALIGN || at < ALIGN || length < 1 || length > MOST_STORED || at + length > files[number].length) fail("a base is outside its file");
    chains.push(chain(codec, base, n + 1));
  });
  chunks.forEach(([, , , , codec], n) => {
    if (chain(codec, based[n] || 0, bases.length + 1) > MOST_DELTAS) fail(`a chain has more than ${MOST_DELTAS} deltas`);
  });
}

function storedBytes(data, at, length, crc) {
  const bytes = data.subarray(at, at + length);
  if (bytes.length !== length || crc32c(bytes) !== crc) fail("a chunk does not match the checksum of its stored bytes");
  if (data.subarray(at + length, Math.ceil((at + length) / ALIGN) * ALIGN).some((byte) => byte)) fail("the padding behind a chunk is not zero");
  return bytes;
}

// The slot of a part, which has the raw bytes of all chunks.
function readSlot(index, files, linked, length) {
  const chunks = index.get("chunks"), bases = index.get("bases") || [], placed = index.get("placed") || [];
  const based = index.get("based") || [], slot = Buffer.alloc(length);
  checkDeltas(chunks, bases, based, files, linked);
  chunks.forEach(([rawAt, rawLength, at, length, codec, elementSize, rawCrc, storedCrc], n) => {
    const deltas = codec === DELTA ? [storedBytes(files[placed[n] || 0], at, length, storedCrc)] : [];
    let whole = [placed[n] || 0, at, length, codec, rawCrc, storedCrc], base = based[n];
    while (whole[3] === DELTA) {
      whole = bases[base - 1];
      base = whole[6];
      if (whole[3] === DELTA) deltas.unshift(storedBytes(files[whole[0]], whole[1], whole[2], whole[5]));
    }
    const [number, wholeAt, wholeLength, wholeCodec, wholeCrc, wholeStoredCrc] = whole;
    const raw = slot.subarray(rawAt, rawAt + rawLength);
    decodeStored(storedBytes(files[number], wholeAt, wholeLength, wholeStoredCrc), wholeCodec, rawLength, elementSize).copy(raw);
    if (crc32c(raw) !== wholeCrc) fail(`the base of chunk ${n} does not match its checksum`);
    deltas.forEach((delta) => addDelta(delta, raw, elementSize));
    if (crc32c(raw) !== rawCrc) fail(`chunk ${n} does not match its checksum`);
  });
  return slot;
}

function readPart(directory, entry) {
  const file = fs.readFileSync(path.join(directory, entry.file));
  checked(file, "CKPTDPRT", HEADER_BODY, FILES | LINKED | BASES);
  const trailer = file.subarray(file.length - TRAILER);
  checked(trailer, "CKPTDEND", TRAILER_BODY, 0);
  const offset = Number(trailer.readBigUInt64LE(16)), length = Number(trailer.readBigUInt64LE(24));
  if (Number(trailer.readBigUInt64LE(32)) !== file.length) fail("a part has another length than its trailer says");
  const document = file.subarray(offset, offset + length);
  if (crc32c(document) !== trailer.readUInt32LE(40) || sha256(document) !== entry.index_sha256) fail("an index does not match its digest");
  if (file.subarray(offset + length, file.length - TRAILER).some((byte) => byte)) fail("the padding behind an index is not zero");
  const index = decode(document), plan = decode(index.get("plan"));
  if (sha256(index.get("plan")) !== index.get("signature").toString("hex")) fail("a plan does not match its signature");
  const links = index.get("linked") || [], numbers = [0, ...links.map(([number]) => number)];
  if (numbers.some((number, n) => number <= numbers[n - 1] || number > (index.get("files") || []).length)) fail("links are out of order");
  const linked = new Map(links.map(([number, nonce, there, step]) => [number, [nonce, there, step]]));
  const files = openFiles(directory, entry.file, file, index, linked), [valuesAt, valuesLength] = index.get("values");
  const slot = readSlot(index, files, linked, valuesAt + valuesLength);
  return { plan, slot, values: decode(slot.subarray(valuesAt)) };
}

// -- tensors

const ELEMENTS = {
  float32: [4, (data, at) => data.readFloatLE(at)], float64: [8, (data, at) => data.readDoubleLE(at)],
  int64: [8, (data, at) => Number(data.readBigInt64LE(at))], int32: [4, (data, at) => data.readInt32LE(at)],
  int16: [2, (data, at) => data.readInt16LE(at)], int8: [1, (data, at) => data.readInt8(at)], uint8: [1, (data, at) => data.readUInt8(at)],
  bool: [1, (data, at) => data.readUInt8(at) === 1],
  complex128: [16, (data, at) => [data.readDoubleLE(at), data.readDoubleLE(at + 8)]],
  bfloat16: [2, (data, at) => Buffer.from([0, 0, data[at], data[at + 1]]).readFloatLE(0)],
};

function inOrder(size) {
  return size.map((_, n) => size.slice(n + 1).reduce((a, b) => a * b, 1));
}

function nested(size, elements) {
  if (size.length === 0) return elements[0];
  const each = elements.length / size[0];
  return Array.from({ length: size[0] }, (_, n) => nested(size.slice(1), elements.slice(n * each, (n + 1) * each)));
}

function tensorsOf(parts) {
  const whole = new Map();
  const put = (name, dtype, size, offsets, sizes, stride, slot, start) => {
    const [width, read] = ELEMENTS[dtype] || fail(`this reader does not know the dtype ${dtype}`), places = inOrder(size);
    const steps = stride || inOrder(sizes), held = whole.get(name) || { size, elements: new Array(size.reduce((a, b) => a * b, 1)) };
    const copy = (dimension, from, to) => {
      if (dimension === sizes.length) held.elements[to] = read(slot, from);
      else for (let n = 0; n < sizes[dimension]; n++) {
        copy(dimension + 1, from + n * width * steps[dimension], to + (offsets[dimension] + n) * places[dimension]);
      }
    };
    copy(0, start, 0);
    whole.set(name, held);
  };
  for (const { plan, slot } of parts) {
    const starts = new Map();
    for (const [name, dtype, size, offsets, sizes, stride, offset] of plan.get("items")) {
      starts.set(name, offset);
      if (!name.startsWith("~")) put(name, dtype, size, offsets, sizes, stride, slot, offset);
    }
    for (const [name, base, offset, dtype, size, stride] of plan.get("aliases")) {
      put(name, dtype, size, size.map(() => 0), size, stride, slot, starts.get(base) + offset);
    }
  }
  return new Map([...whole].map(([name, { size, elements }]) =>
    [name, elements.includes(undefined) ? fail(`${name} is not whole`) : nested(size, elements)]));
}

// -- values

class Own {
  constructor(value) {
    this.value = value;
  }
}

function plain(value, tensors) {
  const inner = (data) => plain(decode(data), tensors);
  const dict = (pairs) => new Map(pairs);
  if (value instanceof Map) return new Map([...value].map(([key, item]) => [key, plain(item, tensors)]));
  if (Array.isArray(value)) return value.map((item) => plain(item, tensors));
  if (Buffer.isBuffer(value)) return { bytes: value.toString("hex") };
  if (!(value instanceof Ext)) return value;
  const text = () => value.data.toString("utf8");
  const made = {
    1: () => tensors.get(text()), 2: () => inner(value.data), 3: () => inner(value.data), 4: () => inner(value.data),
    5: () => dict(inner(value.data)), 6: text, 7: () => inner(value.data), 10: () => inner(value.data).slice(1).join("."),
    11: () => inner(value.data)[1], 12: text, 13: text, 14: () => inner(value.data), 15: () => dict(inner(value.data)),
    16: () => dict(inner(value.data)), 17: () => inner(value.data)[0], 19: () => ({ bytes: value.data.toString("hex") }),
    20: () => inner(value.data)[1], 21: () => new Own(inner(value.data)), 22: () => inner(value.data)[1], 24: () => inner(value.data)[2],
    25: () => dict(inner(value.data)[1]),
  }[value.code];
  return made ? made() : fail(`this reader does not know the extension type ${value.code}`);
}

function isOptimizer(tree) {
  const found = tree.has("state") && tree.get("param_groups");
  return Array.isArray(found) && found.every((group) => group instanceof Map && Array.isArray(group.get("params")));
}

function groups(optimizers) {
  const seen = new Set(), found = [];
  for (const group of optimizers.flatMap((tree) => tree.get("param_groups"))) {
    const fresh = group.get("params").filter((name) => !seen.has(name));
    fresh.forEach((name) => seen.add(name));
    if (fresh.length || !group.get("params").length) found.push({ ...merged([group]), params: fresh });
  }
  return found;
}

function merged(trees) {
  const [first] = trees;
  if (first instanceof Own) {
    const values = trees.filter((tree) => tree instanceof Own).map((tree) => merged([tree.value]));
    return values.length === 1 ? values[0] : values;
  }
  if (first instanceof Map) {
    const maps = trees.filter((tree) => tree instanceof Map), keys = new Set(maps.flatMap((tree) => [...tree.keys()]));
    const made = Object.fromEntries([...keys].map((key) => [key, merged(maps.filter((tree) => tree.has(key)).map((tree) => tree.get(key)))]));
    if (isOptimizer(first)) made.param_groups = groups(maps.filter(isOptimizer));
    return made;
  }
  if (Array.isArray(first)) {
    const alike = trees.filter((tree) => Array.isArray(tree) && tree.length === first.length);
    return first.map((_, n) => merged(alike.map((tree) => tree[n])));
  }
  return first;
}

function read(directory) {
  const data = fs.readFileSync(path.join(directory, "manifest.json")), text = data.toString("utf8");
  const tail = /^"sha256": "([0-9a-f]{64})"\n}\n$/.exec(data.subarray(-79).toString("latin1")) || fail("the manifest is cut short");
  if (sha256(data.subarray(0, data.length - 79)) !== tail[1]) fail("the manifest does not match its digest");
  const manifest = JSON.parse(text);
  if (manifest.version !== 1 || manifest.features.some((name) => !FEATURES.includes(name))) fail("the manifest was written by a newer ckptd");
  const parts = manifest.parts.map((entry) => readPart(directory, entry)), tensors = tensorsOf(parts);
  return merged(parts.map((part) => plain(part.values.get("state"), tensors)));
}

function answer(directory) {
  try {
    return { state: read(directory) };
  } catch (error) {
    return { refused: error.message };
  }
}

for (const directory of process.argv.slice(2)) console.log(JSON.stringify(answer(directory)));
