// The instructions of AMX where the library is built to emulate them (XQ_EMULATED), so that their kernels are tested on
// CPUs without it. Speed does not count. AVX512-VNNI has to be there, as the kernels around the tiles need it.
//
// Tiles are read and written by loads and stores like others, so the sanitizers see what tiles touch, which they do
// not see of the real instructions.
#pragma once

#ifdef XQ_EMULATED

namespace {

struct EmulatedTiles {
  alignas(64) uint8_t data[8][16][64];
  uint16_t bytes[8];
  uint8_t rows[8];
  bool configured = false;
};

thread_local EmulatedTiles emulated_tiles;

// The real instructions raise SIGILL without a configuration.
inline EmulatedTiles& configured_tiles() {
  if (!emulated_tiles.configured) __builtin_trap();
  return emulated_tiles;
}

inline void emulated_loadconfig(const void* config) {
  const uint8_t* at = static_cast<const uint8_t*>(config);
  EmulatedTiles& tiles = emulated_tiles;
  if (at[0] != 1) __builtin_trap();  // the palette
  memcpy(tiles.bytes, at + 16, sizeof tiles.bytes);
  memcpy(tiles.rows, at + 48, sizeof tiles.rows);
  memset(tiles.data, 0, sizeof tiles.data);
  tiles.configured = true;
}

inline void emulated_release() { emulated_tiles.configured = false; }

inline void emulated_zero(int tile) {
  EmulatedTiles& tiles = configured_tiles();
  memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

inline void emulated_loadd(int tile, const void* base, int64_t stride) {
  EmulatedTiles& tiles = configured_tiles();
  memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
  for (int row = 0; row < tiles.rows[tile]; ++row)
    memcpy(tiles.data[tile][row], static_cast<const uint8_t*>(base) + row * stride, tiles.bytes[tile]);
}

inline void emulated_stored(int tile, void* base, int64_t stride) {
  const EmulatedTiles& tiles = configured_tiles();
  for (int row = 0; row < tiles.rows[tile]; ++row)
    memcpy(static_cast<uint8_t*>(base) + row * stride, tiles.data[tile][row], tiles.bytes[tile]);
}

// Shapes that do not belong together raise SIGILL, too.
inline int check_product(const EmulatedTiles& tiles, int sums, int a, int b) {
  const int deep = tiles.bytes[a] / 4;
  if (tiles.rows[sums] != tiles.rows[a] || tiles.bytes[sums] != tiles.bytes[b] || tiles.rows[b] != deep) __builtin_trap();
  return deep;
}

inline void emulated_dpbusd(int sums, int a, int b) {
  EmulatedTiles& tiles = configured_tiles();
  const int deep = check_product(tiles, sums, a, b);
  for (int row = 0; row < tiles.rows[sums]; ++row) {
    __m512i total = _mm512_load_si512(tiles.data[sums][row]);
    for (int k = 0; k < deep; ++k) {
      int32_t quad;
      memcpy(&quad, tiles.data[a][row] + 4 * k, sizeof quad);
      total = _mm512_dpbusd_epi32(total, _mm512_set1_epi32(quad), _mm512_load_si512(tiles.data[b][k]));
    }
    _mm512_store_si512(tiles.data[sums][row], total);
  }
}

// Products of even and of odd places of K are summed apart, as the instruction does; it also takes denormals for zero.
inline void emulated_dpbf16ps(int sums, int a, int b) {
  EmulatedTiles& tiles = configured_tiles();
  const int deep = check_product(tiles, sums, a, b);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto even = [](__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); };
  const auto odd = [high](__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, high)); };
  for (int row = 0; row < tiles.rows[sums]; ++row) {
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int k = 0; k < deep; ++k) {
      int32_t pair;
      memcpy(&pair, tiles.data[a][row] + 4 * k, sizeof pair);
      const __m512i ours = _mm512_set1_epi32(pair), theirs = _mm512_load_si512(tiles.data[b][k]);
      evens = _mm512_fmadd_ps(even(ours), even(theirs), evens);
      odds = _mm512_fmadd_ps(odd(ours), odd(theirs), odds);
    }
    const __m512 before = _mm512_load_ps(reinterpret_cast<const float*>(tiles.data[sums][row]));
    _mm512_store_ps(reinterpret_cast<float*>(tiles.data[sums][row]), _mm512_add_ps(before, _mm512_add_ps(evens, odds)));
  }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stream_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbusd emulated_dpbusd
#define _tile_dpbf16ps emulated_dpbf16ps

#endif  // XQ_EMULATED
