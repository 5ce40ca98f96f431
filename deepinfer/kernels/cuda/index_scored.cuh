// Which entries of a row have scores, among those that it sees: all, or with candidates those of NUM_BLOCKS blocks of
// BLOCK_SIZE. Only the last block may be short, and it is always a candidate.

__device__ __forceinline__ int scored_of(int visible) {
  if (NUM_BLOCKS == 0) return visible;
  const int blocks = (visible + BLOCK_SIZE - 1) / BLOCK_SIZE;
  return visible - max(blocks - NUM_BLOCKS, 0) * BLOCK_SIZE;
}
