// The router: logits, scores, the TOP best experts of each row with their weights, and the pairs of (row, chosen expert) in
// the order of their experts.
//
// Entries. route: all of it in one launch, up to a few hundred rows. route_logits: partial sums of the logits alone, for
// more rows. route_select: the rest, from such sums; with ORDER all blocks of threads (CTAs) form one cluster, and what
// they have chosen is ordered right away. order_pairs: orders what was chosen before, for many rows.
//
// Logits: partial[s, rows, EXPERTS] = x[rows, slice s] @ gate[EXPERTS, slice s]^T in float32. A CTA has 32 GROUPS experts,
// one slice of SLICE columns and ROWS rows, all of it in shared memory at once. Its 8 warps are 2 halves of the experts
// times 4 quarters of the slice; the quarters are added in order, and so are the slices, by whoever selects: a logit's
// bits depend neither on the number of rows nor on the other rows, nor on GROUPS and NT.
//
// In one launch the CTAs of a row tile draw numbers when their sums are written. Those with the last numbers select, a
// share of the rows each, and wait for the others to finish; all before them are done. They are fewer than NT per row
// tile, so the CTAs that they wait for find room (the launcher sees to it), and no later kernel can take that room: it
// starts once all CTAs of this one run. Of those that select, the last to finish orders the pairs and sets the counters
// back to 0. The next launch that uses them touches them behind its griddepcontrol.wait.
//
// A row's experts are distinct. So a CTA marks each choice as one bit, by expert and row; the number of set bits before
// it is a pair's place within its expert. Bits and counts come out the same in whatever order the threads run.
//
// Compile-time constants: EXPERTS (a multiple of VECTOR), LOGITS, SELECT, ORDER (0 or 1: what is done), THREADS; for
// logits HIDDEN (a multiple of 8), NT (8-row tiles of a CTA), GROUPS; for the rest TOP (<= 32), CLUSTER (CTAs that order
// together), SLICES (partial sums per logit), VECTOR (logits that a thread loads at once), HAS_IMAGE, HAS_POSITIONS.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define WARPS (THREADS / 32)
#define PER_LANE ((EXPERTS + 31) / 32)
#define PER_THREAD ((EXPERTS + THREADS - 1) / THREADS)

#define SLICE 512
#define ROWS (8 * NT)
#define GROUP_EXPERTS (32 * GROUPS)
#define STRIDE (2 * SLICE + 16)         // bytes of a row in shared memory: rows start in different banks
#define SUM_STRIDE (GROUP_EXPERTS + 4)  // floats of a row of sums, for the same reason
#define GATE_BYTES (GROUP_EXPERTS * STRIDE)

struct Arguments {
  const u16* x;             // [rows, HIDDEN] bf16
  const u16* gate;          // [EXPERTS, HIDDEN] bf16
  float* partial;           // [SLICES, rows, EXPERTS]
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
  int* arrivals;            // [1 + row tiles], 0: CTAs that have finished to select; by row tile, those with their sums
  int rows, rows_per_cta, block;
  float scale;
};

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes) {  // 16 bytes, those past `bytes` zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ int load_of(const int* p, u32 rank) {  // the value at this place in another CTA
  if (CLUSTER == 1) return *p;
  u32 address = (u32)__cvta_generic_to_shared(p);
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ int add_released(int* p, int value) {  // after what this thread has seen was written
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ void wait_until(const int* p, int value) {  // fails after seconds, instead of hanging
  int seen;
  for (u32 tries = 0;; ++tries) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
    if (seen >= value) break;
    if (tries > 50000000) asm volatile("trap;");
  }
}
// Written by other CTAs of this launch: never from the L1 cache.
__device__ __forceinline__ int load_global(const int* p) { return __ldcg(p); }
__device__ __forceinline__ void load_global(float (&to)[1], const float* p) { to[0] = __ldcg(p); }
__device__ __forceinline__ void load_global(float (&to)[2], const float* p) {
  const float2 v = __ldcg((const float2*)p);
  to[0] = v.x, to[1] = v.y;
}
__device__ __forceinline__ void load_global(float (&to)[4], const float* p) {
  const float4 v = __ldcg((const float4*)p);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void wait_for_earlier_kernels() {  // and let the next one start
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

// ---------------------------------------------------------------- logits
#if LOGITS
static_assert(HIDDEN % 8 == 0, "a copy is 16 bytes");
static_assert(THREADS == 256, "2 halves of the experts, 4 quarters of the slice");
static_assert(4 * ROWS * SUM_STRIDE * 4 <= GATE_BYTES + ROWS * STRIDE, "the sums take the place of the operands");

// `count` rows of a matrix [limit, HIDDEN] from `row` on, SLICE columns from `column` on; zeros outside.
__device__ __forceinline__ void copy_rows(u32 to, const u16* matrix, int row, int count, int limit, int column) {
  for (int i = threadIdx.x; i < count * (SLICE / 8); i += THREADS) {
    const int r = i / (SLICE / 8), c = i % (SLICE / 8) * 8;
    const bool exists = row + r < limit && column + c < HIDDEN;
    copy_async(to + r * STRIDE + c * 2, exists ? matrix + (long long)(row + r) * HIDDEN + column + c : matrix,
               exists ? 16 : 0);
  }
}

// This CTA's sums, to global memory.
__device__ __forceinline__ void make_logits(const Arguments& a, char* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2, quarter = warp / 2;
  const int first_expert = blockIdx.x * GROUP_EXPERTS, slice = blockIdx.y, first_row = blockIdx.z * ROWS;
  const u32 gate_shared = shared_address(shared), x_shared = gate_shared + GATE_BYTES;

  copy_rows(gate_shared, a.gate, first_expert, GROUP_EXPERTS, EXPERTS, slice * SLICE);  // older than any kernel in flight
  wait_for_earlier_kernels();
  copy_rows(x_shared, a.x, first_row, ROWS, a.rows, slice * SLICE);
  wait_for_copies();
  __syncthreads();

  float sum[GROUPS][NT][4] = {};
  const u32 gate_lane = gate_shared + (half * (16 * GROUPS) + lane % 16) * STRIDE + lane / 16 * 16 + quarter * (SLICE / 2);
  const u32 x_lane = x_shared + lane % 8 * STRIDE + lane / 8 * 16 + quarter * (SLICE / 2);
#pragma unroll(GROUPS * NT > 8 ? 1 : 4)
  for (int step = 0; step < SLICE / 4 / 32; ++step) {  // 32 columns
    u32 g[GROUPS][2][4];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      load_matrices(g[group][0], gate_lane + group * 16 * STRIDE + step * 64);
      load_matrices(g[group][1], gate_lane + group * 16 * STRIDE + step * 64 + 32);
    }
#pragma unroll
    for (int tile = 0; tile < NT; ++tile) {
      u32 b[4];
      load_matrices(b, x_lane + tile * 8 * STRIDE + step * 64);
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        multiply(sum[group][tile], g[group][0], b[0], b[1]);
        multiply(sum[group][tile], g[group][1], b[2], b[3]);
      }
    }
  }
  __syncthreads();

  float* sums = (float*)shared;  // [4, ROWS, SUM_STRIDE]
#pragma unroll
  for (int group = 0; group < GROUPS; ++group)
#pragma unroll
    for (int tile = 0; tile < NT; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 8 + lane % 4 * 2 + i % 2, expert = (half * GROUPS + group) * 16 + lane / 4 + i / 2 * 8;
        sums[(quarter * ROWS + row) * SUM_STRIDE + expert] = sum[group][tile][i];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * GROUP_EXPERTS; i += THREADS) {
    const int row = i / GROUP_EXPERTS, expert = i % GROUP_EXPERTS;
    if (first_row + row >= a.rows || first_expert + expert >= EXPERTS) continue;
    const float* part = sums + row * SUM_STRIDE + expert;
    float total = part[0];
#pragma unroll
    for (int q = 1; q < 4; ++q) total += part[q * ROWS * SUM_STRIDE];
    a.partial[((long long)slice * a.rows + first_row + row) * EXPERTS + first_expert + expert] = total;
  }
}
#endif

// ---------------------------------------------------------------- order
#if ORDER
struct Order {
  u32* words;   // [num_words, EXPERTS]: bit r of word w is row 32 w + r of this CTA
  u16* before;  // [num_words, EXPERTS]: rows with this expert in earlier words; unused for one word
  int* counts;  // [EXPERTS]: rows of this CTA
  int* first;   // [EXPERTS]: where the first of them goes
  int* sums;    // [WARPS]
  int num_words;
};

// In shared memory from `counts` on: 4 (2 EXPERTS + WARPS) bytes, then 6 (for one word 4) EXPERTS bytes per word.
__device__ __forceinline__ Order order_at(int* counts, int num_words) {
  u32* words = (u32*)counts + 2 * EXPERTS + WARPS;
  return {words, (u16*)(words + num_words * EXPERTS), counts, counts + EXPERTS, counts + 2 * EXPERTS, num_words};
}

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
  const u32 rank = cluster_rank();
  __syncthreads();
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    const int expert = threadIdx.x * PER_THREAD + j;
    if (expert >= EXPERTS) break;
    int count = 0;
    for (int w = 0; w < o.num_words; ++w) {
      if (o.num_words > 1) o.before[w * EXPERTS + expert] = (u16)count;
      count += __popc(o.words[w * EXPERTS + expert]);
    }
    o.counts[expert] = count;
  }
  cluster_arrive();
  cluster_wait();
  int count[PER_THREAD] = {}, earlier[PER_THREAD] = {}, mine = 0;
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    const int expert = threadIdx.x * PER_THREAD + j;
    if (expert >= EXPERTS) break;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r) {
      const int other = load_of(o.counts + expert, r);
      if (r < rank) earlier[j] += other;
      count[j] += other;
    }
    mine += (count[j] + a.block - 1) / a.block;
  }
  cluster_arrive();  // the others' memory is read
  int all;
  int start = exclusive_sum(mine, o.sums, all) * a.block;
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    const int expert = threadIdx.x * PER_THREAD + j;
    if (expert >= EXPERTS) break;
    const int end = start + (count[j] + a.block - 1) / a.block * a.block;
    o.first[expert] = start + earlier[j];
    if (expert % CLUSTER == rank) {
      a.offsets[expert] = start;
      for (int i = start + count[j]; i < end; ++i) a.ordered[i] = a.rows * TOP;
    }
    start = end;
  }
  if (threadIdx.x == 0 && rank == 0) a.offsets[EXPERTS] = *a.total = all * a.block;
  __syncthreads();
  for (int p = threadIdx.x; p < num_rows * TOP; p += THREADS) {
    const int expert = chosen[p], row = p / TOP, pair = first_row * TOP + p;
    int place = -1;
    if (expert >= 0) {
      const int word = row / 32 * EXPERTS + expert;
      place = o.first[expert] + __popc(o.words[word] & ((1u << row % 32) - 1));
      if (o.num_words > 1) place += o.before[word];
      a.ordered[place] = pair;
      if (place % a.block == 0) a.block_expert[place / a.block] = expert;
    }
    a.place[pair] = place;
  }
  cluster_wait();  // nobody leaves while others read its counts
}
#endif

// ---------------------------------------------------------------- selection
#if SELECT
static_assert(TOP <= 32 && TOP <= EXPERTS && EXPERTS % VECTOR == 0, "shape");

__device__ __forceinline__ float score_of(float logit) {
  return sqrtf(logit > 20.0f ? logit : log1pf(expf(fminf(logit, 20.0f))));
}

// scores [num_rows, EXPERTS] of the rows from first_row on.
__device__ __forceinline__ void make_scores(const Arguments& a, float* scores, int first_row, int num_rows) {
  for (int i = threadIdx.x; i < num_rows * (EXPERTS / VECTOR); i += THREADS) {
    const float* from = a.partial + (long long)first_row * EXPERTS + i * VECTOR;
    float part[SLICES][VECTOR];
#pragma unroll
    for (int s = 0; s < SLICES; ++s) load_global(part[s], from + (long long)s * a.rows * EXPERTS);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      float logit = part[0][v];
#pragma unroll
      for (int s = 1; s < SLICES; ++s) logit += part[s][v];
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

struct Biases {
  float text[PER_LANE], image[PER_LANE];

  __device__ __forceinline__ explicit Biases(const Arguments& a) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
      const bool exists = lane + 32 * j < EXPERTS;
      text[j] = exists ? a.bias[lane + 32 * j] : 0.0f;
      image[j] = HAS_IMAGE && exists ? a.image_bias[lane + 32 * j] : 0.0f;
    }
  }
};

// A warp chooses a row's experts by its `scores` and writes them. Returns this lane's, -1 for none (lanes from TOP on).
__device__ __forceinline__ int choose(const Arguments& a, const Biases& biases, const float* scores, int row) {
  const int lane = threadIdx.x % 32;
  const bool is_image = HAS_IMAGE && a.is_image[row] != 0, is_live = !HAS_POSITIONS || a.positions[row] >= 0;
  float values[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j)
    values[j] = lane + 32 * j < EXPERTS ? scores[lane + 32 * j] + (is_image ? biases.image[j] : biases.text[j])
                                        : __int_as_float(0xFF800000);
  const int expert = select(values);
  const float score = scores[min(max(expert, 0), EXPERTS - 1)];
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < TOP; ++t) sum += __shfl_sync(~0u, score, t);
  const int found = is_live && lane < TOP ? expert : -1;
  if (lane < TOP) {
    a.experts[(long long)row * TOP + lane] = found;
    a.weights[(long long)row * TOP + lane] = is_live ? a.scale * score / (sum + 1e-20f) : 0.0f;
  }
  return found;
}
#endif

// ---------------------------------------------------------------- the kernels
#if LOGITS && !SELECT
// Grid: groups of experts, slices, row tiles.
extern "C" __global__ void __launch_bounds__(THREADS) route_logits(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  make_logits(a, shared);
}
#endif

#if SELECT && !LOGITS
extern "C" __global__ void __launch_bounds__(THREADS) route_select(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  float* scores = (float*)shared;  // [rows_per_cta, EXPERTS]
  const int warp = threadIdx.x / 32;
  const int first_row = blockIdx.x * a.rows_per_cta, num_rows = max(0, min(a.rows_per_cta, a.rows - first_row));
  const Biases biases(a);
#if ORDER
  static_assert(EXPERTS <= THREADS, "a thread per expert");
  int* chosen = (int*)(scores + a.rows_per_cta * EXPERTS);  // [rows_per_cta, TOP]
  const Order o = order_at(chosen + a.rows_per_cta * TOP, 1);
  clear_words(o);
#endif
  wait_for_earlier_kernels();
  make_scores(a, scores, first_row, num_rows);
  __syncthreads();
  for (int r = warp; r < num_rows; r += WARPS) {
    const int expert = choose(a, biases, scores + r * EXPERTS, first_row + r);
#if ORDER
    const int lane = threadIdx.x % 32;
    if (lane < TOP) chosen[r * TOP + lane] = expert;
    if (expert >= 0) atomicOr(o.words + expert, 1u << r);
#endif
  }
#if ORDER
  order(a, o, chosen, first_row, num_rows);
#endif
}
#endif

#if ORDER && !SELECT
// rows_per_cta: a multiple of 32.
extern "C" __global__ void __launch_bounds__(THREADS) order_pairs(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const Order o = order_at((int*)shared, a.rows_per_cta / 32);
  const int first_row = blockIdx.x * a.rows_per_cta, num_rows = max(0, min(a.rows_per_cta, a.rows - first_row));
  const int* chosen = a.experts + (long long)first_row * TOP;
  clear_words(o);
  wait_for_earlier_kernels();
  __syncthreads();
#pragma unroll 4
  for (int p = threadIdx.x; p < num_rows * TOP; p += THREADS) {
    const int expert = chosen[p], row = p / TOP;
    if (expert >= 0) atomicOr(o.words + row / 32 * EXPERTS + expert, 1u << row % 32);
  }
  order(a, o, chosen, first_row, num_rows);
}
#endif

#if LOGITS && SELECT
static_assert(CLUSTER == 1, "one CTA orders");

// CTAs that select the rows of a tile: one per 8 rows, a warp for each row.
__device__ __forceinline__ int num_selecting(const Arguments& a, int tile) {
  return min((min(ROWS, a.rows - tile * ROWS) + WARPS - 1) / WARPS, (int)(gridDim.x * gridDim.y));
}

// The number that this CTA draws, in all its threads: how many drew before it. What its threads wrote is then visible to
// whoever sees the counter.
__device__ __forceinline__ int draw(int* counter, int* drawn) {
  __syncthreads();
  if (threadIdx.x == 0) *drawn = add_released(counter, 1);
  __syncthreads();
  return *drawn;
}

// Grid: groups of experts, slices, row tiles.
extern "C" __global__ void __launch_bounds__(THREADS) route(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int drawn[2];
  make_logits(a, shared);

  const int tile = blockIdx.z, all = gridDim.x * gridDim.y, share = num_selecting(a, tile);
  const int number = draw(a.arrivals + 1 + tile, drawn) - (all - share);
  if (number < 0) return;
  const Biases biases(a);
  if (threadIdx.x == 0) wait_until(a.arrivals + 1 + tile, all);
  __syncthreads();
  float* scores = (float*)shared;  // [WARPS, EXPERTS]
  for (int first = tile * ROWS + number * WARPS; first < min(tile * ROWS + ROWS, a.rows); first += share * WARPS) {
    const int num_rows = min(WARPS, a.rows - first), warp = threadIdx.x / 32;
    make_scores(a, scores, first, num_rows);
    __syncthreads();
    if (warp < num_rows) choose(a, biases, scores + warp * EXPERTS, first + warp);
    __syncthreads();
  }

  int all_selecting = 0;
  for (int t = 0; t < (int)gridDim.z; ++t) all_selecting += num_selecting(a, t);
  if (draw(a.arrivals, drawn + 1) != all_selecting - 1) return;
  for (int t = threadIdx.x; t <= (int)gridDim.z; t += THREADS) a.arrivals[t] = 0;
#if ORDER
  int* chosen = (int*)shared;  // [rows, TOP]
  const Order o = order_at(chosen + a.rows * TOP, (a.rows + 31) / 32);
  clear_words(o);
  __syncthreads();
  for (int p = threadIdx.x; p < a.rows * TOP; p += THREADS) {
    const int expert = load_global(a.experts + p), row = p / TOP;
    chosen[p] = expert;
    if (expert >= 0) atomicOr(o.words + row / 32 * EXPERTS + expert, 1u << row % 32);
  }
  order(a, o, chosen, 0, a.rows);
#endif
}
#endif
