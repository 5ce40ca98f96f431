// After dense.h and dense_skinny.h: what deepinfer/kernels/cuda/moe_skinny.cu needs besides.

static std::vector<Meeting> team_meetings(16);
static void meet_team(int team) { meet(team_meetings[team], 32 * SPLIT); }
static uint4 load_activations(const u16* p) {
  needs_earlier_kernels();
  if ((uintptr_t)p % 16) fail("misaligned activations");
  return *(const uint4*)p;
}
static uint4 load_older(const u16* p) {  // of what is older than the kernel before
  if ((uintptr_t)p % 16) fail("misaligned activations");
  return *(const uint4*)p;
}
static void copy_tile(u32 to, const void* from, u32 address) {
  if (to % 16) fail("misaligned copy");
  std::memcpy(at(to), in_weights(from, TILE_BYTES), TILE_BYTES);
  bytes_arrive(address, TILE_BYTES);
}
static u32 __funnelshift_r(u32 low, u32 high, int count) { return (u32)(((u64)high << 32 | low) >> count); }
template <int HALF> static u32 times(u32 a, u32 b) { return times(a, (b >> 16 * HALF & 0xFFFF) * 0x10001); }
