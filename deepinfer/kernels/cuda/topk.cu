// Exact selection of the largest int16 order keys of each row, ascending by index, ties to the lowest index.
//
// One cluster of CLUSTER CTAs per row, each with a contiguous part of the keys. A histogram of the upper 11 bits finds the
// bin of the last selected key, one of the lower 5 bits the key itself; then every CTA knows how many keys before its part
// are selected and writes its own in order. All counts are integers: the result does not depend on the split.
//
// A row that one CTA reads faster alone is left to the first CTA of its cluster; the others leave at once.
//
// Compile-time constants: COUNT (keys to select), CLUSTER (1, 2, 4, 8), GROUP (1; or 8: keys are the largest of 8
// consecutive entries, capped at the largest finite bf16, the last one above all), NUM_BLOCKS and BLOCK_SIZE (as in the
// scores), PER_BLOCK, HAS_SLOTS and HAS_ENTRIES (what is written), THREADS, SHORT (keys that one CTA takes alone).

#include "clusters.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "types.cuh"

#define BINS 2048
#define LOW_BINS 32
#define WARPS (THREADS / 32)
#define VECTOR (8 / GROUP)        // keys of one 16-byte load
#define STEP (THREADS * VECTOR)   // keys of one round

static_assert((GROUP == 1 || GROUP == 8) && THREADS % 32 == 0 && BINS % (4 * THREADS) == 0, "shape");

struct Arguments {
  const short* keys;    // [rows, keys_stride], 16-byte aligned rows
  const int* visible;   // [rows]
  const int* sequence;  // [rows]
  const int* table;     // [sequences, blocks]
  const int* blocks;    // [rows, NUM_BLOCKS]
  int* slots;           // [rows, COUNT]
  int* entries;         // [rows, COUNT]
  int keys_stride, table_stride;
};

struct Shared {
  int high[BINS];
  int low[LOW_BINS];
  int picked[COUNT];     // indices that this CTA selects, in order
  int sums[WARPS], other_sums[WARPS];
  int bin, above, before;  // what one thread found out for all
};

__device__ __forceinline__ int4 load_remote_4(u32 from) {
  int4 v;
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {  // two int16 each
  u32 c;
  asm("max.s16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

#include "index_scored.cuh"

// Keys [index, index + VECTOR) in [0, 65535]; those from `end` on are -1, below every key.
__device__ __forceinline__ void load_keys(const short* keys, int index, int end, int num_keys, int (&out)[VECTOR]) {
  if (index >= end) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) out[i] = -1;
    return;
  }
  const uint4 v = *reinterpret_cast<const uint4*>(keys + (long long)index * GROUP);
  if (GROUP == 1) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const int key = (int)((words[i / 2] >> (16 * (i % 2))) & 0xFFFF) ^ 0x8000;
      out[i] = index + i < end ? key : -1;
    }
  } else {
    const u32 pair = larger_pair(larger_pair(v.x, v.y), larger_pair(v.z, v.w));
    const int best = max((int)(short)(pair & 0xFFFF), (int)(short)(pair >> 16)) + 32768;
    out[0] = index == num_keys - 1 ? 0xFF80 : min(best, 0xFF7F);
  }
}

// Sum over all threads before this one; `total` over all. Every thread calls it; scratch may be used again after the next
// barrier. (route_select.cu has the same sum; with one text for both, one of them would get other machine code.)
__device__ __forceinline__ int exclusive_sum(int value, int* scratch, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int before = sum - value;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const int other = scratch[w];
    if (w < warp) before += other;
    total += other;
  }
  return before;
}

// The bin of the `count`-th largest key: leaves bin, keys above it, and keys above it in CTAs before this one. Histograms
// are summed over the cluster. All threads.
template <int SIZE> __device__ __forceinline__ void find_bin(Shared& s, const int* histogram, int count, u32 rank, u32 ranks) {
  constexpr int EACH = SIZE / THREADS;  // thread i takes bins from the top down: SIZE - 1 - i * EACH, ...
  int own[EACH], before[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) own[i] = before[i] = 0;
  const int first = SIZE - (threadIdx.x + 1) * EACH;
  for (u32 r = 0; r < ranks; ++r) {
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
      const int4 v = ranks == 1 ? *reinterpret_cast<const int4*>(histogram + first + i)
                                : load_remote_4(remote_address(shared_address(histogram + first + i), r));
      const int values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        own[i + j] += values[j];
        if (r < rank) before[i + j] += values[j];
      }
    }
  }
  int sum = 0, sum_before = 0, total;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    sum += own[i];
    sum_before += before[i];
  }
  int above = exclusive_sum(sum, s.sums, total);
  int above_before = exclusive_sum(sum_before, s.other_sums, total);
  if (above < count && above + sum >= count) {  // exactly one thread
#pragma unroll
    for (int i = EACH - 1; i >= 0; --i) {
      if (above + own[i] >= count) {
        s.bin = first + i;
        s.above = above;
        s.before = above_before;
        break;
      }
      above += own[i];
      above_before += before[i];
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void write(const Arguments& a, int row, int place, int index) {
  int entry = index;
  if (NUM_BLOCKS > 0 && index >= 0) {
    entry = a.blocks[(long long)row * NUM_BLOCKS + index / BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE;
  }
  const long long at = (long long)row * COUNT + place;
  if (HAS_ENTRIES) a.entries[at] = entry;
  if (HAS_SLOTS) {
    int slot = -1;
    if (index >= 0) {
      const int block = a.table[(long long)a.sequence[row] * a.table_stride + entry / PER_BLOCK];
      slot = block * PER_BLOCK + entry % PER_BLOCK;
    }
    a.slots[at] = slot;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) select_top(const Arguments a) {
  __shared__ __align__(16) Shared s;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = blockIdx.y;
  const int num_entries = scored_of(a.visible[row]), num_keys = (num_entries + GROUP - 1) / GROUP;
  const bool is_shared = CLUSTER > 1 && num_keys > SHORT && num_keys > COUNT;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0, ranks = is_shared ? CLUSTER : 1;
  if (rank >= ranks) return;
  if (num_keys <= COUNT) {
    for (int place = threadIdx.x; place < COUNT; place += THREADS) write(a, row, place, place < num_keys ? place : -1);
    return;
  }
  const short* keys = a.keys + (long long)row * a.keys_stride;
  const int rounds = (num_keys + STEP - 1) / STEP, share = (rounds + ranks - 1) / ranks * STEP;
  const int begin = min((int)rank * share, num_keys), end = min(begin + share, num_keys);
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) s.high[bin] = 0;
  if (threadIdx.x < LOW_BINS) s.low[threadIdx.x] = 0;
  __syncthreads();

  for (int round = begin; round < end; round += STEP) {
    int values[VECTOR];
    load_keys(keys, round + threadIdx.x * VECTOR, end, num_keys, values);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (values[i] >= 0) atomicAdd(&s.high[values[i] >> 5], 1);
    }
  }
  if (ranks > 1) cluster_barrier();
  else __syncthreads();
  find_bin<BINS>(s, s.high, COUNT, rank, ranks);
  const int bin = s.bin, wanted = COUNT - s.above, before_high = s.before;

  for (int round = begin; round < end; round += STEP) {
    int values[VECTOR];
    load_keys(keys, round + threadIdx.x * VECTOR, end, num_keys, values);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      if (values[i] >> 5 == bin) atomicAdd(&s.low[values[i] & 31], 1);
    }
  }
  if (ranks > 1) cluster_barrier();
  else __syncthreads();
  // Every warp does the same with the 32 low bins, one per lane from the top down.
  const int lane = threadIdx.x % 32, low_bin = LOW_BINS - 1 - lane;
  int own = 0, own_before = 0;
  for (u32 r = 0; r < ranks; ++r) {
    const int value = ranks == 1 ? s.low[low_bin] : load_remote(remote_address(shared_address(&s.low[low_bin]), r));
    own += value;
    if (r < rank) own_before += value;
  }
  int up_to = own, before_up_to = own_before;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, step), other_before = __shfl_up_sync(~0u, before_up_to, step);
    if (lane >= step) {
      up_to += other;
      before_up_to += other_before;
    }
  }
  const int last_lane = __ffs(__ballot_sync(~0u, up_to >= wanted)) - 1;
  const int last = bin * 32 + LOW_BINS - 1 - last_lane;                                 // the last selected key
  const int num_equal = wanted - __shfl_sync(~0u, up_to - own, last_lane);              // how many of its equals
  int larger = before_high + __shfl_sync(~0u, before_up_to - own_before, last_lane);    // selected before this part
  int equal = __shfl_sync(~0u, own_before, last_lane);                                  // equals before this part
  const int offset = larger + min(equal, num_equal);

  for (int round = begin, turn = 0; round < end; round += STEP, ++turn) {
    const int index = round + threadIdx.x * VECTOR;
    int values[VECTOR], counts = 0, total;
    load_keys(keys, index, end, num_keys, values);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) counts += (values[i] > last) + ((values[i] == last) << 16);
    const int before = exclusive_sum(counts, turn % 2 ? s.other_sums : s.sums, total);
    int larger_here = larger + (before & 0xFFFF), equal_here = equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const bool is_equal = values[i] == last;
      if (values[i] > last || (is_equal && equal_here < num_equal)) {
        s.picked[larger_here + min(equal_here, num_equal) - offset] = index + i;
      }
      larger_here += values[i] > last;
      equal_here += is_equal;
    }
    larger += total & 0xFFFF;
    equal += total >> 16;
  }
  __syncthreads();
  const int num_picked = larger + min(equal, num_equal) - offset;
  for (int i = threadIdx.x; i < num_picked; i += THREADS) write(a, row, offset + i, s.picked[i]);
  if (ranks > 1) cluster_barrier();  // nobody leaves while its histograms are read
}
