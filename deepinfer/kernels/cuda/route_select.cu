// The router behind its logits: scores, the TOP best experts of each row with their weights, and the pairs of (row,
// chosen expert) in the order of their experts.
//
// route_select: rows_per_cta rows per block of threads (CTA), a warp per row. With ORDER all CTAs form one cluster, and
// what they have chosen is ordered right away. order_pairs: orders what was chosen before, for many rows.
//
// A row's experts are distinct. So a CTA marks each choice as one bit, by expert and row; the number of set bits before
// it is a pair's place within its expert. Bits and counts come out the same in whatever order the threads run.
//
// Compile-time constants: EXPERTS (a multiple of VECTOR), TOP (<= 32), THREADS (>= EXPERTS if pairs are ordered), CLUSTER
// (CTAs that order together), ORDER, SLICES (partial sums per logit), VECTOR (logits that a thread loads at once),
// HAS_IMAGE, HAS_POSITIONS.

#include "types.cuh"

#define WARPS (THREADS / 32)
#define PER_LANE ((EXPERTS + 31) / 32)

static_assert(TOP <= 32 && TOP <= EXPERTS && EXPERTS % VECTOR == 0, "shape");
static_assert(!ORDER || EXPERTS <= THREADS, "a thread per expert");

struct Arguments {
  const float* partial;     // [SLICES, rows, EXPERTS]
  const float* bias;        // [EXPERTS]
  const float* image_bias;  // [EXPERTS]
  const u8* is_image;       // [rows]
  const int* positions;     // [rows], -1 in padding
  int* experts;             // [rows, TOP]
  float* weights;           // [rows, TOP]
  int* ordered;             // [blocks * block]
  int* block_expert;        // [blocks]
  int* total;               // [1]
  int* offsets;             // [EXPERTS + 1]
  int* place;               // [rows * TOP]
  int rows, rows_per_cta, block;
  float scale;
};

// ---------------------------------------------------------------- instructions
#include "clusters.cuh"
#include "launch.cuh"
#include "memory.cuh"

__device__ __forceinline__ void cluster_arrive() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ int load_of(const int* p, u32 rank) {  // the value at this place in another CTA
  return CLUSTER == 1 ? *p : load_remote(remote_address(shared_address(p), rank));
}

// ---------------------------------------------------------------- order
struct Order {
  u32* words;   // [num_words, EXPERTS]: bit r of word w is row 32 w + r of this CTA
  u16* before;  // [num_words, EXPERTS]: rows with this expert in earlier words; unused for one word
  int* counts;  // [EXPERTS]: rows of this CTA
  int* first;   // [EXPERTS]: where the first of them goes
  int* sums;    // [WARPS]
  int num_words;
};

// Sum over all threads before this one; `total` over all.
__device__ __forceinline__ int exclusive_sum(int value, int* sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = sum - value;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before;
}

__device__ __forceinline__ void clear_words(const Order& o) {
  for (int i = threadIdx.x; i < o.num_words * EXPERTS; i += THREADS) o.words[i] = 0;
}

// Every thread of the cluster, after all rows are marked. `chosen` holds the experts of this CTA's rows.
__device__ __forceinline__ void order(const Arguments& a, const Order& o, const int* chosen, int first_row, int num_rows) {
  const int expert = threadIdx.x;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  __syncthreads();
  int count = 0, earlier = 0;
  if (expert < EXPERTS) {
    for (int w = 0; w < o.num_words; ++w) {
      if (o.num_words > 1) o.before[w * EXPERTS + expert] = (u16)count;
      count += __popc(o.words[w * EXPERTS + expert]);
    }
    o.counts[expert] = count;
  }
  cluster_arrive();
  cluster_wait();
  if (expert < EXPERTS) {
    count = 0;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r) {
      const int other = load_of(o.counts + expert, r);
      if (r < rank) earlier += other;
      count += other;
    }
  }
  cluster_arrive();  // the others' memory is read
  const int blocks = (count + a.block - 1) / a.block;
  int all;
  const int start = exclusive_sum(blocks, o.sums, all) * a.block, end = start + blocks * a.block;
  if (expert < EXPERTS) {
    o.first[expert] = start + earlier;
    if (expert % CLUSTER == rank) {
      a.offsets[expert] = start;
      for (int i = start + count; i < end; ++i) a.ordered[i] = a.rows * TOP;
    }
  }
  if (threadIdx.x == 0 && rank == 0) a.offsets[EXPERTS] = *a.total = all * a.block;
  __syncthreads();
  for (int p = threadIdx.x; p < num_rows * TOP; p += THREADS) {
    const int mine = chosen[p], row = p / TOP, pair = first_row * TOP + p;
    int place = -1;
    if (mine >= 0) {
      const int word = row / 32 * EXPERTS + mine;
      place = o.first[mine] + __popc(o.words[word] & ((1u << row % 32) - 1));
      if (o.num_words > 1) place += o.before[word];
      a.ordered[place] = pair;
      if (place % a.block == 0) a.block_expert[place / a.block] = mine;
    }
    a.place[pair] = place;
  }
  cluster_wait();  // nobody leaves while others read its counts
}

// ---------------------------------------------------------------- selection
__device__ __forceinline__ float score_of(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(fminf(logit, 20.0f))));
}

struct __align__(4 * VECTOR) Logits {
  float value[VECTOR];
};

// scores [num_rows, EXPERTS] of the rows from first_row on.
__device__ __forceinline__ void make_scores(const Arguments& a, float* scores, int first_row, int num_rows) {
  for (int i = threadIdx.x; i < num_rows * (EXPERTS / VECTOR); i += THREADS) {
    const float* from = a.partial + (long long)first_row * EXPERTS + i * VECTOR;
    Logits part[SLICES];
#pragma unroll
    for (int s = 0; s < SLICES; ++s) part[s] = *(const Logits*)(from + (long long)s * a.rows * EXPERTS);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      float logit = part[0].value[v];
#pragma unroll
      for (int s = 1; s < SLICES; ++s) logit += part[s].value[v];
      scores[i * VECTOR + v] = score_of(logit);
    }
  }
}

// The largest of a lane's values, the first of equal ones.
__device__ __forceinline__ void best_of_lane(const float (&values)[PER_LANE], float& best, int& at) {
  float value[PER_LANE];
  int index[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) value[j] = values[j], index[j] = j;
#pragma unroll
  for (int step = 1; step < PER_LANE; step *= 2)
#pragma unroll
    for (int j = 0; j + step < PER_LANE; j += 2 * step)
      if (value[j + step] > value[j]) value[j] = value[j + step], index[j] = index[j + step];
  best = value[0], at = index[0];
}

// A warp: lane t < TOP gets the t-th best expert. Lane l holds experts l, l + 32, ...; ties go to the lower expert.
__device__ __forceinline__ int select(float (&values)[PER_LANE]) {
  const int lane = threadIdx.x % 32;
  int chosen = 0;
  for (int t = 0; t < TOP; ++t) {
    float best;
    int at;
    best_of_lane(values, best, at);
    const u32 bits = __float_as_uint(best), key = bits ^ ((bits >> 31) ? 0xFFFFFFFFu : 0x80000000u);
    const u32 largest = __reduce_max_sync(~0u, key);
    const int winner = (int)__reduce_min_sync(~0u, key == largest ? (u32)(lane + 32 * at) : 0x7FFFFFFFu);
    if (lane == t) chosen = winner;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
      if (lane + 32 * j == winner) values[j] = __int_as_float(0xFF800000);
  }
  return chosen;
}

extern "C" __global__ void __launch_bounds__(THREADS) route_select(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  float* scores = (float*)shared;  // [rows_per_cta, EXPERTS]
  int* chosen = (int*)(scores + a.rows_per_cta * EXPERTS);  // [rows_per_cta, TOP]
  int* counts = chosen + a.rows_per_cta * TOP;
  u32* words = (u32*)counts + 2 * EXPERTS + WARPS;
  const Order o = {words, (u16*)0, counts, counts + EXPERTS, counts + 2 * EXPERTS, 1};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * a.rows_per_cta, num_rows = max(0, min(a.rows_per_cta, a.rows - first_row));

  float bias[PER_LANE], image_bias[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) {
    const bool exists = lane + 32 * j < EXPERTS;
    bias[j] = exists ? a.bias[lane + 32 * j] : 0.0f;
    image_bias[j] = HAS_IMAGE && exists ? a.image_bias[lane + 32 * j] : 0.0f;
  }
  if (ORDER) clear_words(o);
  let_next_kernel_start();  // the shared expert's product, which needs nothing of this: see nvrtc.py
  wait_for_earlier_kernels();
  make_scores(a, scores, first_row, num_rows);
  __syncthreads();

  for (int r = warp; r < num_rows; r += WARPS) {
    const float* mine = scores + r * EXPERTS;
    const bool is_image = HAS_IMAGE && a.is_image[first_row + r] != 0;
    const bool is_live = !HAS_POSITIONS || a.positions[first_row + r] >= 0;
    float values[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
      values[j] = lane + 32 * j < EXPERTS ? mine[lane + 32 * j] + (is_image ? image_bias[j] : bias[j])
                                          : __int_as_float(0xFF800000);
    const int expert = select(values);
    const float score = mine[min(max(expert, 0), EXPERTS - 1)];
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < TOP; ++t) sum += __shfl_sync(~0u, score, t);
    if (lane < TOP) {
      const int at = r * TOP + lane, found = is_live ? expert : -1;
      a.experts[first_row * TOP + at] = found;
      a.weights[first_row * TOP + at] = is_live ? a.scale * score / (sum + 1e-20f) : 0.0f;
      if (ORDER) {
        chosen[at] = found;
        if (is_live) atomicOr(words + expert, 1u << r);
      }
    }
  }
  if (ORDER) order(a, o, chosen, first_row, num_rows);
}

#if ORDER
// rows_per_cta: a multiple of 32.
extern "C" __global__ void __launch_bounds__(THREADS) order_pairs(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const int num_words = a.rows_per_cta / 32;
  int* counts = (int*)shared;
  u32* words = (u32*)counts + 2 * EXPERTS + WARPS;
  const Order o = {words, (u16*)(words + num_words * EXPERTS), counts, counts + EXPERTS, counts + 2 * EXPERTS, num_words};
  const int first_row = blockIdx.x * a.rows_per_cta, num_rows = max(0, min(a.rows_per_cta, a.rows - first_row));
  const int* chosen = a.experts + (long long)first_row * TOP;
  clear_words(o);
  let_next_kernel_start();  // as in route_select
  wait_for_earlier_kernels();
  __syncthreads();
#pragma unroll 4
  for (int p = threadIdx.x; p < num_rows * TOP; p += THREADS) {
    const int expert = chosen[p], row = p / TOP;
    if (expert >= 0) atomicOr(words + row / 32 * EXPERTS + expert, 1u << row % 32);
  }
  order(a, o, chosen, first_row, num_rows);
}
#endif
