// CPU kernels of the operations in ops.py, called by MindSpore as ahead-of-time custom operations.
//
// What they save over MindSpore's own CPU operations: passes over memory (each kernel fuses what is a chain
// of operations there), transposes (attention reads [B,S,N,h] as it lies), padding of the experts' rows,
// and slow cases such as reductions over the last axis. Matrix products are those of the oneDNN library
// inside the MindSpore wheel, called by one thread each; the parallelism is here.
//
// All tensors are contiguous; float means fp32. Every output element is computed by one task with a fixed
// order of summation, and partial sums are added in the order of their index: for a given number of threads
// each bit is the same run after run, however the threads are scheduled.
//
// A kernel returns 0, or one of the codes below, which MindSpore turns into an exception.

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" int dnnl_sgemm(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha,
                          const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                          int64_t ldc);

namespace {

enum Status { kOk = 0, kShapeMismatch = 11, kIndexOutOfRange = 12, kMatrixProductFailed = 13 };

int Report(const char *kernel, int status) {
  const char *what = status == kShapeMismatch     ? "the shapes of its arguments do not fit"
                     : status == kIndexOutOfRange ? "an index or label is out of range"
                                                  : "a matrix product failed";
  if (status != kOk) std::fprintf(stderr, "CPU kernel %s: %s\n", kernel, what);
  return status;
}

std::atomic<int> g_threads{0};

int Threads() {
  int n = g_threads.load(std::memory_order_relaxed);
  return n > 0 ? n : omp_get_max_threads();
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// While one lives, its thread takes denormal numbers as zero. MindSpore's threads differ in this mode, so
// that without it a result would depend on the thread that computes it.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ and DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (1ul << 24)));  // FZ
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Runs body(task) for every task; tasks are handed out one by one, since they differ in size.
template <typename Body>
void Parallel(int64_t tasks, const Body &body) {
  const int threads = static_cast<int>(std::min<int64_t>(Threads(), tasks));
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    FlushDenormals flush;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) body(i);
  }
}

// Runs body(first, last) over [0, n) in ranges of about `grain` elements of work, `work` per index.
template <typename Body>
void ParallelRanges(int64_t n, int64_t work, const Body &body, int64_t grain = 32768) {
  const int64_t step = std::max<int64_t>(1, grain / std::max<int64_t>(1, work));
  Parallel(CeilDiv(n, step), [&](int64_t i) { body(i * step, std::min(n, (i + 1) * step)); });
}

// Scratch memory is kept between calls: fresh pages for each would cost more than some kernels.

void Grow(std::vector<float> *buffer, int64_t size) {
  if (static_cast<int64_t>(buffer->size()) < size) {
    buffer->clear();  // the old contents need not be copied
    buffer->resize(size);
  }
}

// Small scratch of a task: each thread has its own.
float *Scratch(int slot, int64_t size) {
  thread_local std::vector<float> buffers[2];
  Grow(&buffers[slot], size);
  return buffers[slot].data();
}

// Large scratch of a kernel: lent from the process, since MindSpore calls kernels from changing threads.
class Lease {
 public:
  explicit Lease(int64_t size) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        buffer_ = std::move(free_.back());
        free_.pop_back();
      }
    }
    Grow(&buffer_, size);
    next_ = buffer_.data();
  }
  ~Lease() {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(buffer_));
  }
  float *Take(int64_t size) {
    float *taken = next_;
    next_ += size;
    return taken;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<std::vector<float>> free_;
  std::vector<float> buffer_;
  float *next_;
};

// The arguments of a custom operation: inputs first, then outputs.
struct Args {
  void **data;
  int *ranks;
  int64_t **shapes;

  float *f(int i) const { return static_cast<float *>(data[i]); }
  int32_t *i32(int i) const { return static_cast<int32_t *>(data[i]); }
  int64_t dim(int i, int axis) const { return shapes[i][axis < 0 ? ranks[i] + axis : axis]; }
  int64_t rows(int i) const {
    int64_t n = 1;
    for (int a = 0; a + 1 < ranks[i]; ++a) n *= shapes[i][a];
    return n;
  }
  int64_t size(int i) const { return ranks[i] == 0 ? 1 : rows(i) * dim(i, -1); }
};

#define KERNEL(name)                                                                                   \
  static int name##_body(const Args &a);                                                               \
  extern "C" int name(int, void **data, int *ranks, int64_t **shapes, const char **, void *, void *) { \
    FlushDenormals flush;                                                                              \
    return Report(#name, name##_body(Args{data, ranks, shapes}));                                      \
  }                                                                                                    \
  static int name##_body(const Args &a)

// Row-major C = alpha op(A) op(B) + beta C on the calling thread; a failure is remembered in `ok`.
struct Gemm {
  std::atomic<bool> ok{true};
  void operator()(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                  const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    if (m > 0 && n > 0 && dnnl_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) != 0) ok = false;
  }
  int status() const { return ok ? kOk : kMatrixProductFailed; }
};

// exp to about 1 unit in the last place, in a form that compilers vectorise: 2^n times a polynomial on
// |r| <= ln(2)/2 (the Cephes coefficients). Below -87 it is 0, above 88 it is exp(88); NaN stays NaN.
inline float Exp(float x) {
  constexpr float kLow = -87.0f, kHigh = 88.0f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  float c = x < kLow ? kLow : x;
  c = c > kHigh ? kHigh : c;
  const float shifted = c * 1.44269504088896341f + kMagic;
  const float n = shifted - kMagic;
  const float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  uint32_t exponent, bits;
  std::memcpy(&exponent, &shifted, 4);
  std::memcpy(&bits, &p, 4);
  bits += exponent << 23;
  float y;
  std::memcpy(&y, &bits, 4);
  y = x < kLow ? 0.0f : y;
  return x == x ? y : x;
}

inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

}  // namespace

extern "C" void set_threads(int n) { g_threads = n; }

// ------------------------------------------------------------------------------------------------- linear

namespace {

// Length of the pieces into which a dimension is cut for matrix products: two per thread, for balance, but
// none so thin that packing the other matrix shows.
int64_t Piece(int64_t n) { return std::max<int64_t>(64, CeilDiv(CeilDiv(n, 2 * Threads()), 16) * 16); }

}  // namespace

// x [..., I], w [O, I] -> y [..., O]
KERNEL(linear_forward) {
  const int64_t rows = a.rows(0), in = a.dim(0, -1), out = a.dim(1, 0);
  if (a.dim(1, 1) != in) return kShapeMismatch;
  const float *x = a.f(0), *w = a.f(1);
  float *y = a.f(2);
  Gemm gemm;
  if (rows >= out) {
    const int64_t piece = Piece(rows);
    Parallel(CeilDiv(rows, piece), [&](int64_t i) {
      const int64_t r = i * piece, m = std::min(piece, rows - r);
      gemm('N', 'T', m, out, in, 1.0f, x + r * in, in, w, in, 0.0f, y + r * out, out);
    });
  } else {
    const int64_t piece = Piece(out);
    Parallel(CeilDiv(out, piece), [&](int64_t i) {
      const int64_t c = i * piece, n = std::min(piece, out - c);
      gemm('N', 'T', rows, n, in, 1.0f, x, in, w + c * in, in, 0.0f, y + c, out);
    });
  }
  return gemm.status();
}

// dy [..., O], x [..., I], w [O, I] -> dx [..., I], dw [O, I]
KERNEL(linear_backward) {
  const int64_t rows = a.rows(0), out = a.dim(0, -1), in = a.dim(1, -1);
  if (a.rows(1) != rows || a.dim(2, 0) != out || a.dim(2, 1) != in) return kShapeMismatch;
  const float *dy = a.f(0), *x = a.f(1), *w = a.f(2);
  float *dx = a.f(3), *dw = a.f(4);
  const bool by_rows = rows >= in, by_out = out >= in;
  const int64_t dx_piece = Piece(by_rows ? rows : in), dw_piece = Piece(by_out ? out : in);
  const int64_t dx_tasks = CeilDiv(by_rows ? rows : in, dx_piece);
  const int64_t dw_tasks = CeilDiv(by_out ? out : in, dw_piece);
  Gemm gemm;
  Parallel(dx_tasks + dw_tasks, [&](int64_t i) {
    if (i < dx_tasks) {
      const int64_t s = i * dx_piece, n = std::min(dx_piece, (by_rows ? rows : in) - s);
      if (by_rows) {
        gemm('N', 'N', n, in, out, 1.0f, dy + s * out, out, w, in, 0.0f, dx + s * in, in);
      } else {
        gemm('N', 'N', rows, n, out, 1.0f, dy, out, w + s, in, 0.0f, dx + s, in);
      }
    } else {
      const int64_t s = (i - dx_tasks) * dw_piece, n = std::min(dw_piece, (by_out ? out : in) - s);
      if (by_out) {
        gemm('T', 'N', n, in, rows, 1.0f, dy + s, out, x, in, 0.0f, dw + s * in, in);
      } else {
        gemm('T', 'N', out, n, rows, 1.0f, dy, out, x + s, in, 0.0f, dw + s, in);
      }
    }
  });
  return gemm.status();
}

// ------------------------------------------------------------------------------------------------- norm

// x [..., D], w [D], eps [1] -> y like x
KERNEL(rms_norm_forward) {
  const int64_t rows = a.rows(0), width = a.dim(0, -1);
  if (a.size(1) != width) return kShapeMismatch;
  const float *x = a.f(0), *w = a.f(1), eps = a.f(2)[0];
  float *y = a.f(3);
  ParallelRanges(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float *xt = x + t * width;
      float *yt = y + t * width;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += xt[i] * xt[i];
      const float r = 1.0f / std::sqrt(sum / width + eps);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) yt[i] = xt[i] * r * w[i];
    }
  });
  return kOk;
}

// dy, x [..., D], w [D], eps [1] -> dx like x, dw [D]
KERNEL(rms_norm_backward) {
  const int64_t rows = a.rows(1), width = a.dim(1, -1);
  if (a.size(0) != a.size(1) || a.size(2) != width) return kShapeMismatch;
  const float *dy = a.f(0), *x = a.f(1), *w = a.f(2), eps = a.f(3)[0];
  float *dx = a.f(4), *dw = a.f(5);
  // dw is summed over blocks of rows first; the blocks depend on the shape alone.
  const int64_t block = std::max<int64_t>(32, CeilDiv(rows, 256)), blocks = CeilDiv(rows, block);
  Lease lease(blocks * width);
  float *partial = lease.Take(blocks * width);
  Parallel(blocks, [&](int64_t b) {
    float *sum_dw = partial + b * width;
    std::fill_n(sum_dw, width, 0.0f);
    for (int64_t t = b * block; t < std::min(rows, (b + 1) * block); ++t) {
      const float *xt = x + t * width, *dt = dy + t * width;
      float *gt = dx + t * width;
      float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
      for (int64_t i = 0; i < width; ++i) {
        squares += xt[i] * xt[i];
        dot += dt[i] * w[i] * xt[i];
      }
      const float r = 1.0f / std::sqrt(squares / width + eps), k = r * r * dot / width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        gt[i] = r * (dt[i] * w[i] - xt[i] * k);
        sum_dw[i] += dt[i] * xt[i] * r;
      }
    }
  });
  std::fill_n(dw, width, 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) dw[i] += partial[b * width + i];
  }
  return kOk;
}

// ------------------------------------------------------------------------------------------------- rotary

// x [B,S,N,r], cos, sin [B,S,1,r/2], sign [1] -> x with pair i turned by sign * angle i
KERNEL(rotary) {
  const int64_t tokens = a.dim(0, 0) * a.dim(0, 1), heads = a.dim(0, 2), half = a.dim(0, 3) / 2;
  if (a.size(1) != tokens * half || a.size(2) != tokens * half) return kShapeMismatch;
  const float *x = a.f(0), *cos = a.f(1), *sin = a.f(2), sign = a.f(3)[0];
  float *y = a.f(4);
  ParallelRanges(tokens, heads * half * 2, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float *c = cos + t * half, *s = sin + t * half;
      for (int64_t n = 0; n < heads; ++n) {
        const float *in = x + (t * heads + n) * half * 2;
        float *out = y + (t * heads + n) * half * 2;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const float even = in[2 * i], odd = in[2 * i + 1], si = sign * s[i];
          out[2 * i] = even * c[i] - odd * si;
          out[2 * i + 1] = odd * c[i] + even * si;
        }
      }
    }
  });
  return kOk;
}

// ------------------------------------------------------------------------------------------------- swiglu

namespace {

void SwiGLU(const float *gate, const float *up, float *y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] * Sigmoid(gate[i]) * up[i];
}

void SwiGLUBackward(const float *dy, const float *gate, const float *up, float *dgate, float *dup,
                    int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float s = Sigmoid(gate[i]), silu = gate[i] * s;
    dup[i] = dy[i] * silu;
    dgate[i] = dy[i] * up[i] * (s + silu * (1.0f - s));
  }
}

}  // namespace

// gate, up -> silu(gate) * up
KERNEL(swiglu_forward) {
  const int64_t n = a.size(0);
  if (a.size(1) != n) return kShapeMismatch;
  ParallelRanges(n, 1, [&](int64_t first, int64_t last) {
    SwiGLU(a.f(0) + first, a.f(1) + first, a.f(2) + first, last - first);
  });
  return kOk;
}

// dy, gate, up -> dgate, dup
KERNEL(swiglu_backward) {
  const int64_t n = a.size(0);
  if (a.size(1) != n || a.size(2) != n) return kShapeMismatch;
  ParallelRanges(n, 1, [&](int64_t i, int64_t last) {
    SwiGLUBackward(a.f(0) + i, a.f(1) + i, a.f(2) + i, a.f(3) + i, a.f(4) + i, last - i);
  });
  return kOk;
}

// ------------------------------------------------------------------------------------------------- attention
// Query rows are taken in blocks; of the keys, a block reads the range that any of its rows can see, so that
// the scores of a block, not of the sequence squared, are in memory. Backward computes them again, with the
// saved maximum and sum of each row (Dao et al. 2022, without their tiling of the keys).

namespace {

constexpr int64_t kQueryBlock = 64;

// Which keys each query sees: those from `first` to itself that have its segment id.
struct Visible {
  std::vector<int32_t> first;       // [B*S]
  std::vector<uint8_t> contiguous;  // [B*S]: all keys in the range have the segment id
  int64_t length;

  Visible(const int32_t *segments, int64_t batch, int64_t length, int64_t window)
      : first(batch * length), contiguous(batch * length), length(length) {
    for (int64_t b = 0; b < batch; ++b) {
      std::unordered_map<int32_t, int32_t> start;
      const int32_t *s = segments + b * length;
      for (int64_t i = 0; i < length; ++i) {
        const auto [entry, fresh] = start.emplace(s[i], static_cast<int32_t>(i));
        const int64_t at = b * length + i;
        contiguous[at] = fresh || (s[i] == s[i - 1] && contiguous[at - 1]);
        first[at] = static_cast<int32_t>(std::max<int64_t>(entry->second, window > 0 ? i - window + 1 : 0));
      }
    }
  }

  int64_t BlockFirst(int64_t b, int64_t row, int64_t rows) const {
    return *std::min_element(first.begin() + b * length + row, first.begin() + b * length + row + rows);
  }
};

// The scores of one block of queries: row i of `scores` holds the keys from `key`, `keys` of them.
struct Block {
  int64_t row, rows, key, keys;
  Block(const Visible &visible, int64_t b, int64_t index)
      : row(index * kQueryBlock), rows(std::min(kQueryBlock, visible.length - row)),
        key(visible.BlockFirst(b, row, rows)), keys(row + rows - key) {}
};

// Range [from, to) of a row's scores that its query sees; the unseen ones in between become -inf.
inline void Mask(const Visible &visible, const int32_t *segments, int64_t b, int64_t query, int64_t key,
                 float *row, int64_t *from, int64_t *to) {
  const int64_t at = b * visible.length + query;
  *from = visible.first[at] - key;
  *to = query + 1 - key;
  if (!visible.contiguous[at]) {
    const int32_t *s = segments + b * visible.length;
    for (int64_t j = *from; j < *to; ++j) {
      if (s[key + j] != s[query]) row[j] = -INFINITY;
    }
  }
}

}  // namespace

// q, k [B,S,N,h], v [B,S,N,v], segment_ids [B,S], options [2] (scale, window or 0) -> y [B,S,N,v],
// stats [B,N,S,2] (each row's largest score, 1 / its sum of exponentials)
KERNEL(attention_forward) {
  const int64_t batch = a.dim(0, 0), length = a.dim(0, 1), heads = a.dim(0, 2);
  const int64_t qk = a.dim(0, 3), vd = a.dim(2, 3);
  if (a.size(1) != a.size(0) || a.size(2) != batch * length * heads * vd || a.size(3) != batch * length) {
    return kShapeMismatch;
  }
  const float *q = a.f(0), *k = a.f(1), *v = a.f(2), scale = a.f(4)[0];
  const int32_t *segments = a.i32(3);
  float *y = a.f(5), *stats = a.f(6);
  const Visible visible(segments, batch, length, static_cast<int64_t>(a.f(4)[1]));
  const int64_t blocks = CeilDiv(length, kQueryBlock), q_stride = heads * qk, v_stride = heads * vd;
  Gemm gemm;
  Parallel(batch * heads * blocks, [&](int64_t task) {
    const int64_t n = task / blocks % heads, b = task / blocks / heads;
    const Block block(visible, b, blocks - 1 - task % blocks);  // the longest first
    float *p = Scratch(0, kQueryBlock * length);
    const float *keys = k + ((b * length + block.key) * heads + n) * qk;
    const float *values = v + ((b * length + block.key) * heads + n) * vd;
    float *out = y + ((b * length + block.row) * heads + n) * vd;
    gemm('N', 'T', block.rows, block.keys, qk, scale, q + ((b * length + block.row) * heads + n) * qk,
         q_stride, keys, q_stride, 0.0f, p, block.keys);
    float inverse[kQueryBlock];
    for (int64_t i = 0; i < block.rows; ++i) {
      float *row = p + i * block.keys;
      int64_t from, to;
      Mask(visible, segments, b, block.row + i, block.key, row, &from, &to);
      float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t j = from; j < to; ++j) largest = std::max(largest, row[j]);
#pragma omp simd reduction(+ : sum)
      for (int64_t j = from; j < to; ++j) {
        row[j] = Exp(row[j] - largest);
        sum += row[j];
      }
      std::fill(row, row + from, 0.0f);
      std::fill(row + to, row + block.keys, 0.0f);
      float *stat = stats + ((b * heads + n) * length + block.row + i) * 2;
      stat[0] = largest;
      stat[1] = inverse[i] = 1.0f / sum;
    }
    gemm('N', 'N', block.rows, vd, block.keys, 1.0f, p, block.keys, values, v_stride, 0.0f, out, v_stride);
    for (int64_t i = 0; i < block.rows; ++i) {
      for (int64_t j = 0; j < vd; ++j) out[i * v_stride + j] *= inverse[i];
    }
  });
  return gemm.status();
}

// dy [B,S,N,v], q, k, v, segment_ids, options, y, stats as above -> dq, dk, dv
KERNEL(attention_backward) {
  const int64_t batch = a.dim(1, 0), length = a.dim(1, 1), heads = a.dim(1, 2);
  const int64_t qk = a.dim(1, 3), vd = a.dim(3, 3);
  if (a.size(2) != a.size(1) || a.size(3) != a.size(0) || a.size(4) != batch * length) return kShapeMismatch;
  const float *dy = a.f(0), *q = a.f(1), *k = a.f(2), *v = a.f(3), scale = a.f(5)[0], *y = a.f(6);
  const float *stats = a.f(7);
  const int32_t *segments = a.i32(4);
  float *dq = a.f(8), *dk = a.f(9), *dv = a.f(10);
  const Visible visible(segments, batch, length, static_cast<int64_t>(a.f(5)[1]));
  const int64_t blocks = CeilDiv(length, kQueryBlock), q_stride = heads * qk, v_stride = heads * vd;
  Gemm gemm;
  // One task per head: the gradients of its keys and values are sums over the blocks of queries.
  Parallel(batch * heads, [&](int64_t task) {
    const int64_t b = task / heads, n = task % heads, origin = b * length * heads + n;
    for (int64_t t = 0; t < length; ++t) {
      std::fill_n(dk + (origin + t * heads) * qk, qk, 0.0f);
      std::fill_n(dv + (origin + t * heads) * vd, vd, 0.0f);
    }
    float *p = Scratch(0, kQueryBlock * length), *ds = Scratch(1, kQueryBlock * length);
    for (int64_t index = 0; index < blocks; ++index) {
      const Block block(visible, b, index);
      const int64_t row = origin + block.row * heads, key = origin + block.key * heads;
      gemm('N', 'T', block.rows, block.keys, qk, scale, q + row * qk, q_stride, k + key * qk, q_stride, 0.0f,
           p, block.keys);
      gemm('N', 'T', block.rows, block.keys, vd, 1.0f, dy + row * vd, v_stride, v + key * vd, v_stride, 0.0f,
           ds, block.keys);
      for (int64_t i = 0; i < block.rows; ++i) {
        float *pi = p + i * block.keys, *di = ds + i * block.keys;
        const float *dyi = dy + (row + i * heads) * vd, *yi = y + (row + i * heads) * vd;
        const float *stat = stats + ((b * heads + n) * length + block.row + i) * 2;
        const float largest = stat[0], inverse = stat[1];
        int64_t from, to;
        Mask(visible, segments, b, block.row + i, block.key, pi, &from, &to);
        float mean = 0;
        for (int64_t j = 0; j < vd; ++j) mean += dyi[j] * yi[j];
#pragma omp simd
        for (int64_t j = from; j < to; ++j) {
          pi[j] = Exp(pi[j] - largest) * inverse;
          di[j] = pi[j] * (di[j] - mean) * scale;
        }
        std::fill(pi, pi + from, 0.0f);
        std::fill(pi + to, pi + block.keys, 0.0f);
        std::fill(di, di + from, 0.0f);
        std::fill(di + to, di + block.keys, 0.0f);
      }
      gemm('T', 'N', block.keys, vd, block.rows, 1.0f, p, block.keys, dy + row * vd, v_stride, 1.0f,
           dv + key * vd, v_stride);
      gemm('N', 'N', block.rows, qk, block.keys, 1.0f, ds, block.keys, k + key * qk, q_stride, 0.0f,
           dq + row * qk, q_stride);
      gemm('T', 'N', block.keys, qk, block.rows, 1.0f, ds, block.keys, q + row * qk, q_stride, 1.0f,
           dk + key * qk, q_stride);
    }
  });
  return gemm.status();
}

// ------------------------------------------------------------------------------------------------- experts
// A pair is a (token, choice), number token * K + choice. Pairs are sorted by expert, stably; "row" is a
// pair's place in that order.

namespace {

constexpr int64_t kExpertRows = 256;

struct Rows {
  int64_t expert, first, count;
};

// The rows of every expert, in pieces of at most `limit`.
std::vector<Rows> Pieces(const int32_t *starts, int64_t experts, int64_t limit) {
  std::vector<Rows> pieces;
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t r = starts[e]; r < starts[e + 1]; r += limit) {
      pieces.push_back({e, r, std::min(limit, starts[e + 1] - r)});
    }
  }
  return pieces;
}

void Gather(const float *x, const int32_t *order, int64_t top_k, int64_t count, int64_t width, float *rows) {
  for (int64_t i = 0; i < count; ++i) std::copy_n(x + order[i] / top_k * width, width, rows + i * width);
}

// y[token] = sum over its choices, in their order, of the rows of its pairs
void SumChoices(const float *rows, const int32_t *order, int64_t pairs, int64_t top_k, int64_t width,
                float *y) {
  std::vector<int32_t> row_of(pairs);
  for (int64_t r = 0; r < pairs; ++r) row_of[order[r]] = static_cast<int32_t>(r);
  ParallelRanges(pairs / top_k, width * top_k, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float *yt = y + t * width;
      std::copy_n(rows + row_of[t * top_k] * width, width, yt);
      for (int64_t k = 1; k < top_k; ++k) {
        const float *row = rows + row_of[t * top_k + k] * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) yt[i] += row[i];
      }
    }
  });
}

}  // namespace

// x [T,D], slots [T,K], weights [T,K], gate_up [E,2F,D], down [E,D,F]
//   -> y [T,D], order [T*K] (pair of each row), starts [E+1] (first row of each expert), h [T*K,2F] (gate|up)
KERNEL(routed_experts_forward) {
  const int64_t tokens = a.dim(0, 0), width = a.dim(0, 1), top_k = a.dim(1, 1), experts = a.dim(3, 0);
  const int64_t inner = a.dim(4, 2), pairs = tokens * top_k;
  if (a.dim(1, 0) != tokens || a.size(2) != pairs || a.size(3) != experts * 2 * inner * width ||
      a.size(4) != experts * width * inner) {
    return kShapeMismatch;
  }
  const float *x = a.f(0), *weights = a.f(2), *gate_up = a.f(3), *down = a.f(4);
  const int32_t *slots = a.i32(1);
  float *y = a.f(5), *h = a.f(8);
  int32_t *order = a.i32(6), *starts = a.i32(7);

  std::fill_n(starts, experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) {
    if (slots[i] < 0 || slots[i] >= experts) return kIndexOutOfRange;
    ++starts[slots[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
  std::vector<int32_t> next(starts, starts + experts);
  for (int64_t i = 0; i < pairs; ++i) order[next[slots[i]]++] = static_cast<int32_t>(i);

  const auto pieces = Pieces(starts, experts, kExpertRows);
  Lease lease(pairs * width);
  float *out = lease.Take(pairs * width);
  Gemm gemm;
  Parallel(pieces.size(), [&](int64_t index) {
    const Rows &p = pieces[index];
    const int32_t *pair = order + p.first;
    float *in = Scratch(0, kExpertRows * width), *act = Scratch(1, kExpertRows * inner);
    float *hp = h + p.first * 2 * inner;
    Gather(x, pair, top_k, p.count, width, in);
    gemm('N', 'T', p.count, 2 * inner, width, 1.0f, in, width, gate_up + p.expert * 2 * inner * width, width,
         0.0f, hp, 2 * inner);
    for (int64_t i = 0; i < p.count; ++i) {
      const float *gate = hp + i * 2 * inner, weight = weights[pair[i]];
      float *ai = act + i * inner;
      SwiGLU(gate, gate + inner, ai, inner);
      // The weight goes in before the product with down: F values to scale, not D.
      for (int64_t j = 0; j < inner; ++j) ai[j] *= weight;
    }
    gemm('N', 'T', p.count, width, inner, 1.0f, act, inner, down + p.expert * width * inner, inner, 0.0f,
         out + p.first * width, width);
  });
  SumChoices(out, order, pairs, top_k, width, y);
  return gemm.status();
}

// dy [T,D], x, weights, gate_up, down as above, order, starts, h -> dx, dweights, dgate_up, ddown
KERNEL(routed_experts_backward) {
  const int64_t tokens = a.dim(1, 0), width = a.dim(1, 1), top_k = a.dim(2, 1), experts = a.dim(3, 0);
  const int64_t inner = a.dim(4, 2), pairs = tokens * top_k;
  if (a.size(0) != tokens * width || a.size(5) != pairs) return kShapeMismatch;
  const float *dy = a.f(0), *x = a.f(1), *weights = a.f(2), *gate_up = a.f(3), *down = a.f(4), *h = a.f(7);
  const int32_t *order = a.i32(5), *starts = a.i32(6);
  float *dx = a.f(8), *dweights = a.f(9), *dgate_up = a.f(10), *ddown = a.f(11);

  // In the sorted order: the tokens' inputs and output gradients, the weighted activations, the gradients
  // of h and of the inputs.
  Lease lease(pairs * 3 * (width + inner));
  float *in = lease.Take(pairs * width), *dout = lease.Take(pairs * width), *act = lease.Take(pairs * inner);
  float *dh = lease.Take(pairs * 2 * inner), *din = lease.Take(pairs * width);
  Gemm gemm;
  const auto pieces = Pieces(starts, experts, kExpertRows);
  Parallel(pieces.size(), [&](int64_t index) {
    const Rows &p = pieces[index];
    const int32_t *pair = order + p.first;
    float *da = Scratch(0, kExpertRows * inner);
    Gather(x, pair, top_k, p.count, width, in + p.first * width);
    Gather(dy, pair, top_k, p.count, width, dout + p.first * width);
    gemm('N', 'N', p.count, inner, width, 1.0f, dout + p.first * width, width,
         down + p.expert * width * inner, inner, 0.0f, da, inner);
    for (int64_t i = 0; i < p.count; ++i) {
      const int64_t row = p.first + i;
      const float *gate = h + row * 2 * inner, *up = gate + inner, weight = weights[pair[i]];
      float *ai = act + row * inner, *di = da + i * inner;
      float *dgate = dh + row * 2 * inner, *dup = dgate + inner;
      float dot = 0;  // the weight's gradient: dy . (down a) = (dy down) . a
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < inner; ++j) {
        const float s = Sigmoid(gate[j]), silu = gate[j] * s, activation = silu * up[j];
        const float d = di[j] * weight;
        dot += di[j] * activation;
        ai[j] = activation * weight;
        dup[j] = d * silu;
        dgate[j] = d * up[j] * (s + silu * (1.0f - s));
      }
      dweights[pair[i]] = dot;
    }
    gemm('N', 'N', p.count, width, 2 * inner, 1.0f, dh + p.first * 2 * inner, 2 * inner,
         gate_up + p.expert * 2 * inner * width, width, 0.0f, din + p.first * width, width);
  });

  // The weights' gradients: one task per expert and range of output rows; the sum over an expert's rows is
  // never split.
  constexpr int64_t kRange = 128;
  const int64_t gate_up_ranges = CeilDiv(2 * inner, kRange), ranges = gate_up_ranges + CeilDiv(width, kRange);
  Parallel(experts * ranges, [&](int64_t task) {
    const int64_t e = task / ranges, range = task % ranges, first = starts[e], count = starts[e + 1] - first;
    const bool is_down = range >= gate_up_ranges;
    const int64_t r = (is_down ? range - gate_up_ranges : range) * kRange;
    const int64_t all_rows = is_down ? width : 2 * inner, columns = is_down ? inner : width;
    const int64_t rows = std::min(kRange, all_rows - r);
    float *grad = (is_down ? ddown : dgate_up) + (e * all_rows + r) * columns;
    if (count == 0) {
      std::fill_n(grad, rows * columns, 0.0f);
      return;
    }
    const float *left = (is_down ? dout : dh) + first * all_rows + r;
    gemm('T', 'N', rows, columns, count, 1.0f, left, all_rows, (is_down ? act : in) + first * columns,
         columns, 0.0f, grad, columns);
  });
  SumChoices(din, order, pairs, top_k, width, dx);
  return gemm.status();
}

// ------------------------------------------------------------------------------------------------- router

// indices [T,K], columns [n] -> mask [T,n], 1 where chosen
KERNEL(chosen_mask) {
  const int64_t rows = a.dim(0, 0), k = a.dim(0, 1), n = a.dim(1, 0);
  const int32_t *indices = a.i32(0);
  float *mask = a.f(2);
  std::fill_n(mask, rows * n, 0.0f);
  for (int64_t i = 0; i < rows * k; ++i) {
    if (indices[i] < 0 || indices[i] >= n) return kIndexOutOfRange;
    mask[i / k * n + indices[i]] = 1.0f;
  }
  return kOk;
}

// scores [T,n], places [k] -> indices [T,k], best first; of equal scores the lower index first, NaN after all numbers
KERNEL(top_k) {
  const int64_t rows = a.dim(0, 0), n = a.dim(0, 1), k = a.dim(1, 0);
  if (k > n) return kShapeMismatch;
  const float *scores = a.f(0);
  int32_t *indices = a.i32(2);
  ParallelRanges(rows, n * 8, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float *s = scores + t * n;
      int32_t *best = indices + t * k;
      const auto better = [s](int64_t i, int64_t j) {
        return s[i] > s[j] || (std::isnan(s[j]) && !std::isnan(s[i]));
      };
      int64_t count = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (count == k && !better(i, best[k - 1])) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && better(i, best[at - 1]); --at) best[at] = best[at - 1];
        best[at] = static_cast<int32_t>(i);
      }
    }
  });
  return kOk;
}

// ------------------------------------------------------------------------------------------------- loss

namespace {
constexpr int32_t kIgnored = -100;
}

// logits [T,V], labels [T] -> sum of losses (scalar), stats [T,2] (row's largest, 1 / sum of exponentials)
KERNEL(cross_entropy_forward) {
  const int64_t rows = a.dim(0, 0), width = a.dim(0, 1);
  if (a.size(1) != rows) return kShapeMismatch;
  const float *logits = a.f(0);
  const int32_t *labels = a.i32(1);
  float *stats = a.f(3);
  for (int64_t t = 0; t < rows; ++t) {
    if (labels[t] != kIgnored && (labels[t] < 0 || labels[t] >= width)) return kIndexOutOfRange;
  }
  std::vector<double> losses(rows, 0.0);
  ParallelRanges(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float *x = logits + t * width;
      float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < width; ++i) largest = std::max(largest, x[i]);
      double total = 0;
      for (int64_t i = 0; i < width; i += 1024) {  // short sums: a large vocabulary loses nothing
        const int64_t end = std::min(width, i + 1024);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = i; j < end; ++j) sum += Exp(x[j] - largest);
        total += sum;
      }
      stats[2 * t] = largest;
      stats[2 * t + 1] = static_cast<float>(1.0 / total);
      if (labels[t] != kIgnored) losses[t] = std::log(total) - (static_cast<double>(x[labels[t]]) - largest);
    }
  });
  double loss = 0;
  for (double l : losses) loss += l;
  a.f(2)[0] = static_cast<float>(loss);
  return kOk;
}

// dloss (scalar), logits [T,V], labels [T], stats [T,2] -> dlogits
KERNEL(cross_entropy_backward) {
  const int64_t rows = a.dim(1, 0), width = a.dim(1, 1);
  if (a.size(2) != rows || a.size(3) != 2 * rows) return kShapeMismatch;
  const float scale = a.f(0)[0], *logits = a.f(1), *stats = a.f(3);
  const int32_t *labels = a.i32(2);
  float *dlogits = a.f(4);
  ParallelRanges(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float *x = logits + t * width, largest = stats[2 * t], factor = stats[2 * t + 1] * scale;
      float *d = dlogits + t * width;
      if (labels[t] == kIgnored) {
        std::fill_n(d, width, 0.0f);
        continue;
      }
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) d[i] = Exp(x[i] - largest) * factor;
      d[labels[t]] -= scale;
    }
  });
  return kOk;
}

// x -> sum of squares (scalar), accumulated in double
KERNEL(sum_of_squares) {
  const int64_t n = a.size(0);
  const float *x = a.f(0);
  constexpr int64_t kBlock = 65536;
  std::vector<double> partial(CeilDiv(n, kBlock));
  Parallel(partial.size(), [&](int64_t b) {
    double sum = 0;
    const int64_t end = std::min(n, (b + 1) * kBlock);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = b * kBlock; i < end; ++i) sum += static_cast<double>(x[i]) * x[i];
    partial[b] = sum;
  });
  double total = 0;
  for (double p : partial) total += p;
  a.f(1)[0] = static_cast<float>(total);
  return kOk;
}
