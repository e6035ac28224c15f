/* The kernels, and the functions of cuBLASLt that are called, computed on the host one element after
 * the other: with driver.c a GPU that tests/schedules.rs runs schedules on. What a schedule writes where
 * something is still to be read, or reads before it was written, shows in the numbers. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { F32 = 0, F16 = 2, BF16 = 14 };

static double load(const void* at, int dtype, int64_t i) {
  if (dtype == F32) return ((const float*)at)[i];
  const uint32_t bits = (uint32_t)((const uint16_t*)at)[i] << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static void store(void* at, int dtype, int64_t i, double value) {
  float x = (float)value;
  if (dtype == F32) {
    ((float*)at)[i] = x;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &x, 4);
  ((uint16_t*)at)[i] = (uint16_t)(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* As in kernels/cross_entropy.cuh. */
typedef struct {
  float c, exponentials, values, label;
} RowSum;

typedef struct {
  const void* logits;
  void* dlogits;
  const void* labels;
  const float *dloss, *dlogps, *dlse, *saved_lse, *saved_lse_low;
  float *loss, *logps, *lse, *lse_low;
  RowSum* carried;
  int64_t tokens, vocab, columns, stride, first_column, ignore_index;
  double label_smoothing, z_loss, softcap;
  uint32_t labels_are_64_bit, every_token, plan[8];
  double per_element;
  float scale;
  float *entropy, *highest;
  int32_t* argmax;
  const float *saved_entropy, *dentropy;
} Rows;
_Static_assert(sizeof(Rows) == ROWS_BYTES, "Rows is not what kernels take now");

/* As in kernels/fused_product.cuh; a map is what driver.c makes of one. */
typedef struct {
  _Alignas(64) struct {
    void* at;
    size_t extents[2], stride_bytes;
    char rest[96];
  } hidden, weight, dlogits;
  Rows row;
  struct {
    float c, exponentials;
  }* sums;
  float *values, *rounded, *label_logits;
  struct {
    float c, factor, offset;
    int32_t target;
  }* gradients;
  const float* bias;
  const uint32_t* gate;
  uint16_t* rescales;
  uint32_t *rescaled, *labelled;
  const void *hidden_rows, *weight_rows;
  void* scaled_rows;
  float* dbias;
  int64_t width, vocab_step, width_step, written;
  void* part;
  int64_t part_first, part_count, part_stride;
  uint32_t blocks, tiles, parts, token_blocks, group, adds;
  float* weighted;
  struct {
    float before, others;
  }* largest;
} Product;
_Static_assert(sizeof(Product) == PRODUCT_BYTES, "Product is not what kernels take now");

static int64_t label_of(const Rows* a, int64_t row) {
  return a->labels_are_64_bit ? ((const int64_t*)a->labels)[row] : ((const int32_t*)a->labels)[row];
}

static double capped(const Rows* a, double x) {
  return a->softcap > 0 ? a->softcap * tanh(x / a->softcap) : x;
}

/* What an exponential is of. */
static double tempered(const Rows* a, double x) { return capped(a, x) * a->per_element; }

/* The derivative of the cap. */
static double slope_of(const Rows* a, double x) {
  const double z = capped(a, x);
  return a->softcap > 0 ? 1 - z * z / a->softcap / a->softcap : 1;
}

static RowSum sum_of(const Rows* a, int64_t row, const double* x) {
  const int64_t label = label_of(a, row) - a->first_column;
  double most = -1e30, sum = 0, values = 0;
  for (int64_t v = 0; v < a->columns; ++v) most = fmax(most, tempered(a, x[v]));
  for (int64_t v = 0; v < a->columns; ++v) {
    sum += exp(tempered(a, x[v]) - most), values += tempered(a, x[v]);
  }
  const int here = label >= 0 && label < a->columns;
  return (RowSum){(float)-most, (float)sum, (float)values, here ? (float)tempered(a, x[label]) : 0};
}

static RowSum with_carried(const Rows* a, int64_t row, RowSum sum) {
  if (!a->carried || a->first_column == 0) return sum;
  const RowSum other = a->carried[row];
  const float c = fminf(sum.c, other.c);
  return (RowSum){c, sum.exponentials * expf(c - sum.c) + other.exponentials * expf(c - other.c),
                  sum.values + other.values, sum.label + other.label};
}

static void end_row(const Rows* a, int64_t row, RowSum sum, int is_read) {
  if (a->carried && a->first_column + a->columns < a->vocab) {
    a->carried[row] = sum;
    return;
  }
  const int64_t label = label_of(a, row);
  double loss = 0, logps = 0, lse = 0;
  if (is_read) {
    lse = log(sum.exponentials) - sum.c;
    if (label != a->ignore_index) {
      logps = sum.label - lse;
      loss = -(1 - a->label_smoothing) * logps + a->z_loss * lse * lse +
             a->label_smoothing * (lse - sum.values / a->vocab);
      if (label < 0 || label >= a->vocab) loss = logps = NAN;
    }
  }
  if (a->loss) a->loss[row] = (float)loss;
  if (a->logps) a->logps[row] = (float)logps;
  if (a->lse) a->lse[row] = (float)lse;
  if (a->lse_low) a->lse_low[row] = (float)(lse - (float)lse);
}

static void write_gradient(const Rows* a, int dtype, int64_t row, const double* x, double lse, double g,
                           double h, double k) {
  const int64_t label = label_of(a, row);
  const int idle = label == a->ignore_index || (g == 0 && h == 0 && k == 0);
  for (int64_t v = 0; v < a->columns; ++v) {
    const double z = tempered(a, x[v]), at_label = a->first_column + v == label;
    double dz = (g * (1 + 2 * a->z_loss * lse) - h + k) * exp(z - lse) -
                g * ((1 - a->label_smoothing) * at_label + a->label_smoothing / a->vocab) + h * at_label;
    dz *= slope_of(a, x[v]) * a->per_element;
    if (label < 0 || label >= a->vocab) dz = NAN;
    store(a->dlogits, dtype, row * a->stride + v, idle ? 0 : dz);
  }
}

/* What is said of the distribution of a row of logits `x`. */
static void write_distribution(const Rows* a, int64_t row, double lse, const double* x) {
  double entropy = 0;
  int32_t argmax = 0;
  for (int64_t v = 0; v < a->columns; ++v) {
    const double z = tempered(a, x[v]);
    if (z > -INFINITY) entropy -= exp(z - lse) * (z - lse);
    if (x[v] > x[argmax]) argmax = (int32_t)v;
  }
  a->entropy[row] = label_of(a, row) == a->ignore_index ? 0 : (float)entropy;
  a->argmax[row] = argmax;
}

static double optional(const float* numbers, int64_t row) { return numbers ? numbers[row] : 0; }

/* A row of a kernel, whose logits are `x`. */
static void compute_row(const Rows* a, const char* pass, int dtype, int64_t row, const double* x) {
  if (strstr(pass, "backward")) {
    const double lse = (double)a->saved_lse[row] + a->saved_lse_low[row];
    write_gradient(a, dtype, row, x, lse, optional(a->dloss, row), optional(a->dlogps, row),
                   optional(a->dlse, row));
    return;
  }
  const int fused = strstr(pass, "fused_") != NULL && strstr(pass, "forward") == NULL;
  const double g = fused ? a->dloss[row] : 1;
  const int says_more = strstr(pass, "distribution") != NULL;
  const int is_read = a->every_token || (label_of(a, row) != a->ignore_index && (says_more || g != 0));
  const RowSum sum = with_carried(a, row, sum_of(a, row, x));
  end_row(a, row, sum, is_read);
  if (says_more) write_distribution(a, row, log(sum.exponentials) - sum.c, x);
  if (fused) write_gradient(a, dtype, row, x, log(sum.exponentials) - sum.c, g, 0, 0);
}

static int is_idle(const Rows* a, int64_t row) {
  return label_of(a, row) == a->ignore_index || a->dloss[row] == 0;
}

/* A number in 16 bits, as kernels read it again. */
static double rounded_to(int dtype, double value) {
  uint16_t bits;
  store(&bits, dtype, 0, value);
  return load(&bits, dtype, 0);
}

enum { TILE = 256, RESCALE_BITS = 8 };

/* A row of the unnormalised softmax, of logits `x`, and its sums, which are all the first part's. */
static void write_unnormalised(const Product* a, int dtype, int64_t row, const double* x) {
  const Rows* rows = &a->row;
  double sum = 0, rounded = 0, values = 0, weighted = 0, before = -INFINITY, others = -INFINITY;
  int rescales = 0;
  const int64_t placed = (int64_t)a->dlogits.extents[0];
  for (int64_t first = 0; first < rows->columns; first += TILE) {
    const int64_t end = first + TILE < rows->columns ? first + TILE : rows->columns;
    double most = -INFINITY;
    for (int64_t v = first; v < end; ++v) most = fmax(most, tempered(rows, x[v]));
    const double bits = most / log(2) + a->gradients[row].c - RESCALE_BITS * rescales;
    if (bits >= 74) {
      const int steps = (int)ceil((bits + 58) / RESCALE_BITS);
      sum *= exp2(-RESCALE_BITS * steps), rounded *= exp2(-RESCALE_BITS * steps), rescales += steps;
      weighted *= exp2(-RESCALE_BITS * steps);
    }
    for (int64_t v = first; v < end; ++v) {
      const double z = tempered(rows, x[v]), c = a->gradients[row].c - RESCALE_BITS * rescales;
      const double e = exp2(z / log(2) + c);
      sum += e, values += z, weighted += e * z / rows->per_element;
      const int is_before = rows->first_column + v < a->gradients[row].target;
      if (is_before) before = fmax(before, x[v]);
      else others = fmax(others, x[v]);
      const double least = rows->label_smoothing > 0 && z > -INFINITY ? 0x1p-126 : 0;
      const double written = fmax(e * slope_of(rows, x[v]), least);
      rounded += rows->softcap > 0 ? e : rounded_to(dtype, written);
      if (v < placed) {
        store(rows->dlogits, dtype, row * rows->stride + v, a->gradients[row].factor == 0 ? 0 : written);
      }
      if (rows->first_column + v == a->gradients[row].target) a->label_logits[row] = (float)x[v];
    }
    if (rescales > 0 && first < placed) {
      a->rescales[first / TILE * rows->tokens + row] = (uint16_t)rescales;
      *a->rescaled = 1;
    }
  }
  for (uint32_t part = 0; part < a->parts; ++part) {
    const int64_t at = part * rows->tokens + row;
    const int is_first = part == 0;
    a->sums[at].c = is_first ? a->gradients[row].c - RESCALE_BITS * rescales : 1e30f;
    a->sums[at].exponentials = is_first ? (float)sum : 0;
    a->rounded[at] = is_first ? (float)rounded : 0;
    if (a->values) a->values[at] = is_first ? (float)values : 0;
    if (!a->weighted) continue;
    a->weighted[at] = is_first ? (float)weighted : 0;
    a->largest[at].before = is_first ? (float)before : -INFINITY;
    a->largest[at].others = is_first ? (float)others : -INFINITY;
  }
}

/* What the parts of a row add up to, from the highest of their shifts. */
static RowSum merged(const Product* a, int64_t row, double* rounded) {
  RowSum all = {1e30f, 0, 0, 0};
  for (uint32_t part = 0; part < a->parts; ++part) {
    all.c = fminf(all.c, a->sums[part * a->row.tokens + row].c);
  }
  *rounded = 0;
  for (uint32_t part = 0; part < a->parts; ++part) {
    const int64_t at = part * a->row.tokens + row;
    const double scale = exp2(all.c - a->sums[at].c);
    all.exponentials += (float)(scale * a->sums[at].exponentials);
    *rounded += scale * a->rounded[at];
    if (a->values) all.values += a->values[at];
  }
  return all;
}

/* What the uniform target takes off each entry of a row. */
static double uniform_share(const Rows* rows, int64_t row, double at_p, double rounded) {
  return rounded * rows->dloss[row] * rows->label_smoothing / rows->vocab / at_p;
}

/* What a row's label's entry lacks of the hidden states' gradient. */
static double label_term(const Product* a, int64_t row, int64_t d) {
  const int64_t target = a->gradients[row].target;
  if (target < 0 || a->gradients[row].offset == 0) return 0;
  return a->gradients[row].offset *
         load(a->weight_rows, BF16, target * a->vocab_step + d * a->width_step);
}

/* Writes a label's entry, if it is of this part of the columns. */
static void write_label(const Product* a, int64_t row, int64_t target) {
  if (target < a->part_first || target >= a->part_first + a->part_count) return;
  store(a->row.dlogits, BF16, row * a->row.stride + target, a->label_logits[row]);
}

/* Kernels over tokens that are about the unnormalised softmax. */
static int compute_unnormalised(const Product* a, const char* what) {
  const Rows* rows = &a->row;
  if (a->gate && *a->gate == 0) return 0;
  for (int64_t row = 0; row < rows->tokens; ++row) {
    const int64_t label = rows->labels ? label_of(rows, row) : -1;
    const int has_label = label != rows->ignore_index && label >= 0 && label < rows->vocab;
    double rounded = 1;
    const RowSum all = a->sums ? merged(a, row, &rounded) : (RowSum){0, 1, 0, 0};
    const double sum = all.exponentials, lse = (log2(sum) - all.c) * log(2);
    const double at_p = rows->dloss ? rows->dloss[row] * (1 + 2 * rows->z_loss * lse) : 1;
    if (strncmp(what, "begin", 5) == 0) {
      const int64_t column = has_label ? label : 0;
      double logit = 0;
      for (int64_t d = 0; d < a->width; ++d) {
        const int64_t at = d * a->width_step + column * a->vocab_step;
        logit += load(a->hidden_rows, BF16, row * a->width + d) * load(a->weight_rows, BF16, at);
      }
      if (a->bias) logit += a->bias[column];
      logit = tempered(rows, logit);
      /* Sometimes far enough away for a shift that has to be raised, in any tile. */
      if (getenv("FAKE_RESCALES")) logit -= 30 + 40 * (row % 3);
      a->gradients[row].c = (float)(rint(-logit / log(2)) - 58);
      a->gradients[row].factor = !is_idle(rows, row);
      a->gradients[row].target = has_label ? (int32_t)label : -1;
      *a->rescaled = 0;
      if (has_label) a->labelled[label / 32] |= 1u << label % 32;
    } else if (strcmp(what, "align") == 0) {
      if (is_idle(rows, row)) continue;
      const double share = uniform_share(rows, row, at_p, rounded);
      for (int64_t v = 0; v < a->part_count; ++v) {
        const int64_t at = row * rows->stride + v;
        const double rescale = RESCALE_BITS * a->rescales[v / TILE * rows->tokens + row];
        const double e = load(rows->dlogits, BF16, at);
        if (e != 0) store(rows->dlogits, BF16, at, e * exp2(all.c - a->gradients[row].c + rescale) - share);
      }
    } else if (strcmp(what, "distribution") == 0) {
      double weighted = 0, before = -INFINITY, others = -INFINITY;
      for (uint32_t part = 0; part < a->parts; ++part) {
        const int64_t at = part * rows->tokens + row;
        weighted += exp2(all.c - a->sums[at].c) * a->weighted[at];
        before = fmax(before, a->largest[at].before), others = fmax(others, a->largest[at].others);
      }
      const double x = a->label_logits[row], entropy = lse - weighted / sum * rows->per_element;
      rows->entropy[row] = label == rows->ignore_index ? 0 : (float)entropy;
      rows->argmax[row] = has_label && before < x && others <= x ? (int32_t)label : -1;
    } else if (strcmp(what, "end") == 0) {
      RowSum row_sum = {-(float)lse, 1, all.values, 0};
      if (has_label) row_sum.label = (float)tempered(rows, a->label_logits[row]);
      end_row(rows, row, row_sum, rows->every_token || !is_idle(rows, row));
      const double whole = at_p * rows->per_element / rounded;
      const double factor = is_idle(rows, row) ? 0 : has_label ? whole : NAN;
      a->gradients[row].factor = (float)factor, a->gradients[row].offset = 0;
      if (factor != 0 && has_label && label < a->written) {
        const double x = a->label_logits[row], z = tempered(rows, x), uniform = rows->label_smoothing;
        double dz = at_p * exp(z - lse) - rows->dloss[row] * (1 - uniform + uniform / rows->vocab);
        dz *= slope_of(rows, x) * rows->per_element;
        a->label_logits[row] = (float)rounded_to(BF16, dz / factor);
        a->gradients[row].offset = (float)(dz - (float)factor * a->label_logits[row]);
        write_label(a, row, label);
      }
      for (int64_t i = row * a->width; i < (row + 1) * a->width; ++i) {
        store(a->scaled_rows, BF16, i, a->gradients[row].factor * load(a->hidden_rows, BF16, i));
      }
    } else if (strcmp(what, "labels") == 0) {
      const int takes_part = a->gradients[row].factor != 0 || a->gradients[row].offset != 0;
      if (takes_part) write_label(a, row, a->gradients[row].target);
    } else if (strcmp(what, "round") == 0 || strcmp(what, "scale") == 0) {
      for (int64_t d = 0; d < a->width; ++d) {
        const int64_t i = row * a->width + d;
        const double sum = a->gradients[row].factor * load(a->hidden_rows, F32, i);
        store(a->scaled_rows, *what == 'r' ? BF16 : F32, i, sum + label_term(a, row, d));
      }
    } else if (strncmp(what, "label_term_", 11) == 0) {
      const int is_whole = strstr(what, "bf16_dv") != NULL;
      for (int64_t d = 0; is_whole && row == 0 && d < a->part_count; ++d) {
        memset((uint16_t*)a->part + d * a->part_stride, 0, 2 * (size_t)rows->vocab);
      }
      const int64_t target = a->gradients[row].target;
      if (target < 0) continue;
      const int to = strstr(what, "bf16") ? BF16 : F32;
      const double e = load(rows->dlogits, BF16, row * rows->stride + target), f = a->gradients[row].factor;
      const int is_here = strstr(what, "_dv") || (target >= a->part_first && target < a->part_first + a->part_count);
      if (a->dbias && is_here) a->dbias[target] += a->gradients[row].offset;
      for (int64_t d = 0; d < a->width; ++d) {
        const int64_t of_part = (strstr(what, "_dv") ? d : target) - a->part_first;
        if (of_part < 0 || of_part >= a->part_count) continue;
        const int64_t at = of_part * a->part_stride + (strstr(what, "_dv") ? target : d);
        const double h = load(a->hidden_rows, BF16, row * a->width + d);
        const double more = (f * e + a->gradients[row].offset) * h - e * rounded_to(BF16, f * h);
        /* Whoever is the first of those with a label writes. */
        int is_first = a->labelled != NULL && !is_whole;
        for (int64_t other = 0; other < row; ++other) is_first &= a->gradients[other].target != target;
        store(a->part, to, at, is_first ? more : load(a->part, to, at) + more);
      }
    } else {
      return 1;
    }
  }
  return 0;
}

/* A product that has the cross-entropy in it; of others than the unnormalised softmax the kernels before and after it
 * have nothing left to do. */
static void multiply(const Product* a, const char* name, int dtype) {
  const Rows* rows = &a->row;
  const size_t width = a->hidden.extents[0], step = a->weight.stride_bytes / 2;
  const size_t hidden_step = a->hidden.stride_bytes / 2;
  const int vocab_is_last = strstr(name, "_dv") != NULL;
  if (a->gate && *a->gate == 0) return;
  const int is_added = strstr(name, "_added_") != NULL;
  if (is_added || strstr(name, "_sum_")) {
    const int transposed = strstr(name, "_transposed") != NULL;
    const size_t inner = a->hidden.extents[transposed];
    for (int64_t row = 0; row < rows->tokens; ++row) {
      for (int64_t v = 0; v < rows->columns; ++v) {
        const int to = is_added ? dtype : F32;
        const int64_t at = row * (int64_t)(a->dlogits.stride_bytes / (is_added ? 2 : 4)) + v;
        const int64_t bit = a->part_first + row;
        const int is_there = !is_added || !a->labelled || a->labelled[bit / 32] >> bit % 32 & 1;
        double sum = (is_added || a->adds) && is_there ? load(a->dlogits.at, to, at) : 0;
        for (size_t k = 0; k < inner; ++k) {
          sum += load(a->hidden.at, dtype, transposed ? k * hidden_step + row : row * hidden_step + k) *
                 load(a->weight.at, dtype, strstr(name, "_vd") ? v * step + k : k * step + v);
        }
        store(a->dlogits.at, to, at, sum);
      }
    }
    return;
  }
  double* x = malloc(rows->columns * sizeof *x);
  for (int64_t row = 0; row < rows->tokens; ++row) {
    for (int64_t v = 0; v < rows->columns; ++v) {
      const size_t column = rows->first_column + v;
      double sum = a->bias ? a->bias[v] : 0;
      for (size_t d = 0; d < width; ++d) {
        sum += load(a->hidden.at, dtype, row * hidden_step + d) *
               load(a->weight.at, dtype, vocab_is_last ? d * step + column : column * step + d);
      }
      if (strstr(name, "scaled")) {
        const double scaled = a->gradients[row].factor * sum + label_term(a, row, v);
        store(a->dlogits.at, dtype, row * rows->stride + v, scaled);
        continue;
      }
      x[v] = sum;
    }
    if (strstr(name, "unnormalised") || strstr(name, "distribution")) write_unnormalised(a, dtype, row, x);
    else if (!strstr(name, "scaled"))
      compute_row(rows, strstr(name, "backward") ? "backward" : "forward", dtype, row, x);
  }
  free(x);
}

/* See kernels/bias.cu, which has a part's sums in a row. Parts are of no more rows than others of
 * them, by one. */
typedef struct {
  const void* from;
  const float* factors;
  float* to;
  int64_t rows, columns, stride, to_stride;
  uint32_t adds;
} Bias;

static void sum_columns(const Bias* a, int dtype, int64_t parts) {
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t v = 0; v < a->columns; ++v) {
      double sum = a->adds ? a->to[part * a->to_stride + v] : 0;
      for (int64_t row = a->rows * part / parts; row < a->rows * (part + 1) / parts; ++row) {
        sum += load(a->from, dtype, row * a->stride + v) * (a->factors ? a->factors[4 * row + 1] : 1);
      }
      a->to[part * a->to_stride + v] = (float)sum;
    }
  }
}

/* See src/round.rs. */
typedef struct {
  const float* from;
  void* to;
  int64_t rows, columns, stride;
} Round;

int compute(const char* name, const void* arguments, unsigned grid_rows) {
  const int dtype = strstr(name, "bf16") ? BF16 : strstr(name, "f16") ? F16 : F32;
  if (dtype == F16) return 1;
  if (strncmp(name, "round_", 6) == 0) {
    const Round* a = arguments;
    /* Backwards, since on a GPU there is no order that would save what is yet to be read. */
    for (int64_t i = a->rows * a->columns - 1; i >= 0; --i) {
      store(a->to, dtype, i / a->columns * a->stride + i % a->columns, a->from[i]);
    }
    return 0;
  }
  if (strcmp(name, "bias_rows") == 0) {
    const Bias* a = arguments;
    for (int64_t i = 0; i < a->rows * a->columns; ++i) {
      a->to[i / a->columns * a->to_stride + i % a->columns] = ((const float*)a->from)[i % a->columns];
    }
    return 0;
  }
  if (strncmp(name, "bias_sums_", 10) == 0) return sum_columns(arguments, dtype, grid_rows), 0;
  if (strncmp(name, "fused_product_", 14) == 0) {
    const int is_product = strstr(name, "_vd") || strstr(name, "_dv") || strstr(name, "_transposed");
    if (is_product) multiply(arguments, name, dtype);
    return 0;
  }
  if (strncmp(name, "unnormalised_", 13) == 0) return compute_unnormalised(arguments, name + 13);
  if (strncmp(name, "cross_entropy_", 14) != 0) return 1;
  const Rows* a = arguments;
  double* x = malloc(a->columns * sizeof *x);
  for (int64_t row = 0; row < a->tokens; ++row) {
    for (int64_t v = 0; v < a->columns; ++v) x[v] = load(a->logits, dtype, row * a->stride + v);
    compute_row(a, name, dtype, row, x);
  }
  free(x);
  return 0;
}

/* cuBLASLt. Matrices are column-major there. */
typedef struct {
  int dtype;
  uint64_t rows, columns;
  int64_t stride;
} Layout;

int cublasLtCreate(void** handle) { return *handle = malloc(1), 0; }
int cublasLtMatmulDescCreate(int** operation, int compute_type, int scale) {
  *operation = calloc(8, sizeof **operation);
  return compute_type != 68 || scale != F32;
}
int cublasLtMatmulDescSetAttribute(int* operation, int attribute, const void* value, size_t bytes) {
  memcpy(operation + attribute, value, bytes);
  return attribute >= 8 || bytes != 4;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int dtype, uint64_t rows, uint64_t columns,
                               int64_t stride) {
  *layout = malloc(sizeof **layout);
  **layout = (Layout){dtype, rows, columns, stride};
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** preference) { return *preference = malloc(1), 0; }
int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
  return (void)attribute, (void)value, (void)bytes, preference == NULL;
}
int cublasLtMatmulPreferenceDestroy(void* preference) { return free(preference), 0; }
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* results, int* found) {
  (void)a, (void)b, (void)c, (void)d, (void)preference, (void)results;
  return *found = wanted, !handle || !operation;
}
int cublasLtMatmul(void* handle, const int* operation, const float* alpha, const void* a,
                   const Layout* of_a, const void* b, const Layout* of_b, const float* beta, const void* c,
                   const Layout* of_c, void* d, const Layout* of_d, const void* algorithm, void* workspace,
                   size_t workspace_bytes, void* stream) {
  (void)handle, (void)algorithm, (void)stream;
  if (*alpha != 1 || c != d || of_c != of_d) return 1;
  /* Whatever is there may be gone. */
  memset(workspace, 0xff, workspace_bytes);
  const uint64_t inner = operation[3] ? of_a->rows : of_a->columns;
  for (uint64_t n = 0; n < of_d->columns; ++n) {
    for (uint64_t m = 0; m < of_d->rows; ++m) {
      double sum = *beta == 0 ? 0 : *beta * load(c, of_c->dtype, n * of_c->stride + m);
      for (uint64_t k = 0; k < inner; ++k) {
        sum += load(a, of_a->dtype, operation[3] ? m * of_a->stride + k : k * of_a->stride + m) *
               load(b, of_b->dtype, operation[4] ? k * of_b->stride + n : n * of_b->stride + k);
      }
      store(d, of_d->dtype, n * of_d->stride + m, sum);
    }
  }
  return 0;
}
