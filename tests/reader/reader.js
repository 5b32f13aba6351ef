// Reads a checkpoint as FORMAT.md describes it, without any code of ckptd: `node reader.js DIRECTORY`, which prints the state as JSON.
//
// It checks every digest and checksum on the way, and reads chunks that are stored as they are (codec 0). Tensors become nested lists, bytes
// become {"bytes": hex}, and integers that a number of JavaScript cannot hold become text.

"use strict";
const crypto = require("crypto");
const fs = require("fs");
const path = require("path");

const ALIGN = 4096;
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

// -- part files

function checked(data, magic, body, features) {
  if (data.subarray(0, 8).toString("latin1") !== magic) fail(`a header does not begin with ${magic}`);
  if (crc32c(data.subarray(0, body)) !== data.readUInt32LE(body)) fail(`the header ${magic} does not match its checksum`);
  if (data.readUInt16LE(8) !== 1 || data.readUInt32LE(12) & ~features) fail("written by a newer ckptd");
}

function headerOf(index, nonce, number) {
  const header = Buffer.alloc(ALIGN);
  header.write("CKPTDPRT", "latin1");
  header.writeUInt16LE(1, 8);
  header.writeUInt32LE((index.get("files") || []).length ? 1 : 0, 12);
  nonce.copy(header, 16);
  [index.get("attempt"), index.get("rank"), index.get("world_size"), number].forEach((field, n) => header.writeUInt32LE(field, 32 + 4 * n));
  const step = index.get("step");
  header.writeBigUInt64LE(step === null ? 0xffffffffffffffffn : BigInt(step), 48);
  header.write(index.get("job"), 56, "utf8");
  header.writeUInt32LE(crc32c(header.subarray(0, HEADER_BODY)), HEADER_BODY);
  return header;
}

function readPart(directory, entry) {
  const file = fs.readFileSync(path.join(directory, entry.file));
  checked(file, "CKPTDPRT", HEADER_BODY, 1);
  const trailer = file.subarray(file.length - TRAILER);
  checked(trailer, "CKPTDEND", TRAILER_BODY, 0);
  const offset = Number(trailer.readBigUInt64LE(16)), length = Number(trailer.readBigUInt64LE(24));
  if (Number(trailer.readBigUInt64LE(32)) !== file.length) fail("a part has another length than its trailer says");
  const document = file.subarray(offset, offset + length);
  if (crc32c(document) !== trailer.readUInt32LE(40) || sha256(document) !== entry.index_sha256) fail("an index does not match its digest");
  if (file.subarray(offset + length, file.length - TRAILER).some((byte) => byte)) fail("the padding behind an index is not zero");
  const index = decode(document), nonce = file.subarray(16, 32), plan = decode(index.get("plan"));
  if (sha256(index.get("plan")) !== index.get("signature").toString("hex")) fail("a plan does not match its signature");
  const files = [file, ...(index.get("files") || []).map((size, n) => {
    const name = entry.file.replace(/\.ckpt$/, `.${String(n + 1).padStart(4, "0")}.ckpt`), data = fs.readFileSync(path.join(directory, name));
    if (data.length !== size) fail(`${name} is not as long as the index says`);
    return data;
  })];
  files.forEach((data, n) => headerOf(index, nonce, n).equals(data.subarray(0, ALIGN)) || fail(`file ${n} belongs to another part`));
  const [valuesAt, valuesLength] = index.get("values");
  const slot = Buffer.alloc(valuesAt + valuesLength), placed = index.get("placed") || [];
  index.get("chunks").forEach(([rawOffset, rawLength, at, stored, codec, , rawCrc, storedCrc], n) => {
    if (codec !== 0 || stored !== rawLength) fail(`chunk ${n} is encoded with codec ${codec}, which this reader does not know`);
    const bytes = files[placed[n] || 0].subarray(at, at + stored);
    if (crc32c(bytes) !== storedCrc || storedCrc !== rawCrc) fail(`chunk ${n} does not match its checksum`);
    bytes.copy(slot, rawOffset);
  });
  return { plan, slot, values: decode(slot.subarray(valuesAt)) };
}

// -- tensors

const ELEMENTS = {
  float32: [4, (data, at) => data.readFloatLE(at)], float64: [8, (data, at) => data.readDoubleLE(at)],
  int64: [8, (data, at) => Number(data.readBigInt64LE(at))], int32: [4, (data, at) => data.readInt32LE(at)],
  int16: [2, (data, at) => data.readInt16LE(at)], int8: [1, (data, at) => data.readInt8(at)], uint8: [1, (data, at) => data.readUInt8(at)],
  bool: [1, (data, at) => data.readUInt8(at) === 1],
  bfloat16: [2, (data, at) => Buffer.from([0, 0, data[at], data[at + 1]]).readFloatLE(0)],
};

function inOrder(size) {
  return size.map((_, n) => size.slice(n + 1).reduce((a, b) => a * b, 1));
}

function nested(size, element, place = []) {
  if (place.length === size.length) return element(place);
  return Array.from({ length: size[place.length] }, (_, n) => nested(size, element, [...place, n]));
}

function tensorsOf(parts) {
  const whole = new Map();
  const put = (name, dtype, size, offsets, sizes, stride, slot, start) => {
    const [width, read] = ELEMENTS[dtype] || fail(`this reader does not know the dtype ${dtype}`);
    const steps = stride || inOrder(sizes), held = whole.get(name) || { size, elements: new Map() };
    nested(sizes, (place) => {
      const at = start + width * place.reduce((sum, n, dimension) => sum + n * steps[dimension], 0);
      held.elements.set(place.map((n, dimension) => n + offsets[dimension]).join(), read(slot, at));
    });
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
    [name, nested(size, (place) => (elements.has(place.join()) ? elements.get(place.join()) : fail(`${name} is not whole`)))]));
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

function main(directory) {
  const data = fs.readFileSync(path.join(directory, "manifest.json")), text = data.toString("utf8");
  const tail = /^"sha256": "([0-9a-f]{64})"\n}\n$/.exec(data.subarray(-79).toString("latin1")) || fail("the manifest is cut short");
  if (sha256(data.subarray(0, data.length - 79)) !== tail[1]) fail("the manifest does not match its digest");
  const parts = JSON.parse(text).parts.map((entry) => readPart(directory, entry)), tensors = tensorsOf(parts);
  process.stdout.write(JSON.stringify(merged(parts.map((part) => plain(part.values.get("state"), tensors)))) + "\n");
}

try {
  main(process.argv[2]);
} catch (error) {
  process.stderr.write(`${error.message}\n`);
  process.exit(1);
}
