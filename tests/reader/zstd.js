// Decodes one frame of zstd, as RFC 8878 describes it, within the limits that FORMAT.md sets for frames.

"use strict";

const MAGIC = 0xfd2fb528, BLOCK = 131072;
const LITERAL_LENGTHS = {
  base: [...Array(16).keys(), 16, 18, 20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536],
  bits: [...Array(16).fill(0), 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], log: 9,
  counts: [4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1], usual: 6,
};
const MATCH_LENGTHS = {
  base: [...Array(32).keys()].map((n) => n + 3)
    .concat(35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539),
  bits: [...Array(32).fill(0), 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], log: 9,
  counts: [1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, -1, -1, -1, -1, -1, -1, -1], usual: 6,
};
const OFFSETS = {
  base: Array.from({ length: 32 }, (_, n) => 2 ** n), bits: [...Array(32).keys()], log: 8,
  counts: [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1], usual: 5,
};

function fail(why) {
  throw new Error(`a frame of zstd ${why}`);
}

// The `count` bits from bit `at` on, where bit 0 is the lowest bit of the first byte. Bits outside the data are 0.
function bitsAt(data, at, count) {
  let value = 0, scale = 1;
  while (count > 0) {
    const inside = at & 7, length = Math.min(count, 8 - inside);
    value += (((data[at >> 3] || 0) >> inside) & ((1 << length) - 1)) * scale;
    scale *= 1 << length;
    at += length;
    count -= length;
  }
  return value;
}

// Bits that are read from the end of the data to its beginning, behind the highest bit that is set in the last byte.
class Backwards {
  constructor(data) {
    if (!data.length || !data[data.length - 1]) fail("has a stream of bits without an end");
    this.data = data;
    this.left = 8 * data.length - 1 - Math.clz32(data[data.length - 1]) + 24;
  }

  read(count) {
    this.left -= count;
    return bitsAt(this.data, this.left, count);
  }
}

// -- tables of FSE

function fseTable(counts, log) {
  const size = 1 << log, symbols = new Uint8Array(size), next = counts.map(Math.abs), step = (size >> 1) + (size >> 3) + 3;
  let high = size, at = 0;
  counts.forEach((count, symbol) => count === -1 && (symbols[--high] = symbol));
  counts.forEach((count, symbol) => {
    for (; count > 0; count--) {
      symbols[at] = symbol;
      do at = (at + step) & (size - 1); while (at >= high);
    }
  });
  const bits = new Uint8Array(size), base = new Uint16Array(size);
  symbols.forEach((symbol, state) => {
    const number = next[symbol]++;
    bits[state] = log - (31 - Math.clz32(number));
    base[state] = (number << bits[state]) - size;
  });
  return { symbols, bits, base, log };
}

function readFseTable(data, highest, most) {
  const log = bitsAt(data, 0, 4) + 5, counts = [];
  if (log > highest) fail("has a table that is too large");
  let at = 4, left = (1 << log) + 1, threshold = 1 << log, width = log + 1;
  while (left > 1) {
    const most = 2 * threshold - 1 - left, low = bitsAt(data, at, width - 1);
    let value = low;
    if (low < most) at += width - 1;
    else {
      value = bitsAt(data, at, width);
      if (value >= threshold) value -= most;
      at += width;
    }
    counts.push(value - 1);
    left -= Math.abs(value - 1);
    if (value === 1) {
      let zeros;
      do {
        zeros = bitsAt(data, at, 2);
        at += 2;
        for (let n = 0; n < zeros; n++) counts.push(0);
      } while (zeros === 3);
    }
    while (left < threshold && threshold > 1) {
      threshold >>= 1;
      width--;
    }
  }
  if (left !== 1 || counts.length > most || at > 8 * data.length) fail("has a table that is damaged");
  return [fseTable(counts, log), (at + 7) >> 3];
}

// -- literals

function readWeights(data, length) {
  const [table, used] = readFseTable(data.subarray(0, length), 6, 256), weights = [];
  const stream = new Backwards(data.subarray(used, length)), states = [stream.read(table.log), stream.read(table.log)];
  for (let turn = 0; ; turn ^= 1) {
    const state = states[turn];
    weights.push(table.symbols[state]);
    if (weights.length > 254) fail("has too many weights");
    if (stream.left < table.bits[state]) {
      weights.push(table.symbols[states[turn ^ 1]]);
      return weights;
    }
    states[turn] = table.base[state] + stream.read(table.bits[state]);
  }
}

function readHuffman(data) {
  const first = data[0] === undefined ? fail("is cut short") : data[0], direct = first >= 128, length = direct ? (first - 126) >> 1 : first;
  if (1 + length > data.length) fail("is cut short");
  const weights = direct ? Array.from({ length: first - 127 }, (_, n) => (data[1 + (n >> 1)] >> (n & 1 ? 0 : 4)) & 15)
    : readWeights(data.subarray(1), length);
  const sum = weights.reduce((total, weight) => total + (weight && 2 ** (weight - 1)), 0), log = 32 - Math.clz32(sum);
  const last = Math.log2(2 ** log - sum) + 1;
  if (!sum || log > 11 || !Number.isInteger(last)) fail("has weights that are damaged");
  weights.push(last);
  const symbols = new Uint8Array(1 << log), bits = new Uint8Array(1 << log);
  let at = 0;
  for (let weight = 1; weight <= log; weight++) {
    weights.forEach((found, symbol) => {
      if (found !== weight) return;
      symbols.fill(symbol, at, at + (1 << (weight - 1)));
      bits.fill(log + 1 - weight, at, at + (1 << (weight - 1)));
      at += 1 << (weight - 1);
    });
  }
  return [{ symbols, bits, log }, 1 + length];
}

function readStream(table, data, into) {
  const stream = new Backwards(data);
  for (let n = 0; n < into.length; n++) {
    const found = bitsAt(data, stream.left - table.log, table.log);
    into[n] = table.symbols[found];
    stream.left -= table.bits[found];
  }
  if (stream.left !== 0) fail("has a stream of literals of another length");
}

function readLiterals(block, state) {
  const type = block[0] & 3, format = (block[0] >> 2) & 3;
  if (type < 2) {
    const head = [1, 2, 1, 3][format], size = bitsAt(block, format & 1 ? 4 : 3, format & 1 ? 8 * head - 4 : 5);
    const end = head + (type === 0 ? size : 1);
    if (size > BLOCK || end > block.length) fail("has literals that are too long");
    return [type === 0 ? block.subarray(head, end) : Buffer.alloc(size, block[head]), end];
  }
  const width = [10, 10, 14, 18][format], head = (4 + 2 * width) >> 3, size = bitsAt(block, 4, width), end = head + bitsAt(block, 4 + width, width);
  if (size > BLOCK || end > block.length) fail("has literals that are too long");
  let data = block.subarray(head, end);
  if (type === 2) {
    const [table, used] = readHuffman(data);
    state.huffman = table;
    data = data.subarray(used);
  }
  const table = state.huffman || fail("has literals without a table"), literals = Buffer.alloc(size);
  if (format === 0) readStream(table, data, literals);
  else {
    const each = (size + 3) >> 2;
    if (data.length < 6 || 3 * each > size) fail("has streams of literals that are too short");
    const ends = [6, 6 + data.readUInt16LE(0), 0, 0, data.length];
    ends[2] = ends[1] + data.readUInt16LE(2);
    ends[3] = ends[2] + data.readUInt16LE(4);
    for (let n = 0; n < 4; n++) {
      if (ends[n] > ends[n + 1]) fail("has streams of literals that are too long");
      readStream(table, data.subarray(ends[n], ends[n + 1]), literals.subarray(n * each, n === 3 ? size : (n + 1) * each));
    }
  }
  return [literals, end];
}

// -- sequences

function readSequences(block, state) {
  const sequences = [];
  let count = block[0] === undefined ? fail("is cut short") : block[0], at = 1;
  if (count > 127) {
    count = count === 255 ? bitsAt(block, 8, 16) + 0x7f00 : ((count - 128) << 8) + bitsAt(block, 8, 8);
    at = block[0] === 255 ? 3 : 2;
  }
  if (count === 0) return at === block.length ? sequences : fail("has bytes behind a block without sequences");
  const modes = block[at++] || 0;
  if (modes & 3) fail("has reserved bits");
  const tables = [[LITERAL_LENGTHS, 6], [OFFSETS, 4], [MATCH_LENGTHS, 2]].map(([kind, shift]) => {
    const mode = (modes >> shift) & 3;
    if (mode === 0) state.set(kind, fseTable(kind.counts, kind.usual));
    if (mode === 1) state.set(kind, { symbols: [block[at++]], bits: [0], base: [0], log: 0 });
    if (mode === 2) {
      const [table, used] = readFseTable(block.subarray(at), kind.log, kind.base.length);
      state.set(kind, table);
      at += used;
    }
    return state.get(kind) || fail("repeats a table that there is not");
  });
  const stream = new Backwards(block.subarray(at)), states = tables.map((table) => stream.read(table.log));
  const value = (n, kind) => {
    const code = tables[n].symbols[states[n]];
    return code < kind.base.length ? kind.base[code] + stream.read(kind.bits[code]) : fail("has an unknown code");
  };
  for (let n = 0; n < count; n++) {
    const offset = value(1, OFFSETS), match = value(2, MATCH_LENGTHS), literals = value(0, LITERAL_LENGTHS);
    sequences.push([literals, match, offset]);
    if (n < count - 1) [0, 2, 1].forEach((m) => (states[m] = tables[m].base[states[m]] + stream.read(tables[m].bits[states[m]])));
    if (stream.left < 0) fail("has too few bits");
  }
  return stream.left === 0 ? sequences : fail("has too many bits");
}

function readBlock(block, into, at, state) {
  const [literals, used] = readLiterals(block, state), recent = state.recent;
  let taken = 0;
  const copyLiterals = (length) => {
    if (taken + length > literals.length || at + length > into.length) fail("has more bytes than it says");
    literals.copy(into, at, taken, taken + length);
    taken += length;
    at += length;
  };
  for (const [length, match, code] of readSequences(block.subarray(used), state.tables)) {
    copyLiterals(length);
    let offset = code - 3;
    if (code <= 3) {
      const which = code - 1 + (length === 0 ? 1 : 0);
      offset = which === 3 ? recent[0] - 1 : recent[which];
      if (which > 0) recent.splice(which === 3 ? 2 : which, 1);
      if (which > 0) recent.unshift(offset);
    } else {
      recent.pop();
      recent.unshift(offset);
    }
    if (offset < 1 || offset > at || at + match > into.length) fail("has a match outside its content");
    for (const end = at + match; at < end; at++) into[at] = into[at - offset];
  }
  copyLiterals(literals.length - taken);
  return at;
}

// The content of the frame, which has to be `length` bytes. `window` is the largest window that the place allows for longer content.
function unzstd(frame, length, window) {
  if (frame.length < 6 || frame.readUInt32LE(0) !== MAGIC) fail("does not begin with its magic number");
  const flags = frame[4], single = (flags >> 5) & 1, dictionary = [0, 1, 2, 4][flags & 3], width = [single, 2, 4, 8][flags >> 6];
  if (flags & 8 || !width) fail("has a reserved bit, or does not name its content size");
  let at = 5;
  if (frame.length < at + !single + dictionary + width) fail("is cut short");
  const unit = 2 ** (10 + (frame[at] >> 3)), largest = single ? 0 : unit + (unit / 8) * (frame[at] & 7);
  at += single ? 0 : 1;
  if (bitsAt(frame, 8 * at, 8 * dictionary)) fail("needs a dictionary");
  at += dictionary;
  const size = bitsAt(frame, 8 * at, 8 * width) + (width === 2 ? 256 : 0);
  at += width;
  if (size !== length) fail(`has ${size} bytes of content instead of ${length}`);
  if (largest > Math.max(window, length)) fail(`has a window of ${largest} bytes`);
  const into = Buffer.alloc(length), state = { huffman: null, tables: new Map(), recent: [1, 4, 8] };
  let end = 0, last = 0;
  while (!last) {
    const head = at + 3 > frame.length ? fail("is cut short") : frame.readUIntLE(at, 3), type = (head >> 1) & 3, block = head >> 3;
    last = head & 1;
    at += 3;
    const next = at + (type === 1 ? 1 : block);
    if (block > BLOCK || next > frame.length || type === 3) fail("has a block that is damaged");
    if (type < 2 && end + block > length) fail("has more content than it says");
    if (type === 0) frame.copy(into, end, at, next);
    if (type === 1) into.fill(frame[at], end, end + block);
    end = type === 2 ? readBlock(frame.subarray(at, next), into, end, state) : end + block;
    at = next;
  }
  if (end !== length || at + (flags & 4 ? 4 : 0) !== frame.length) fail("has another length than it says");
  return into;
}

module.exports = { unzstd };
