// One forward pass of a Llama-family decoder: embedding, layers, final norm and head.
//
// Called with the model's parameters and a pass over B sequences of T rows each, everything by
// address. Threads share the outputs of each part of a layer and wait for each other between
// the parts. No partial sum is divided among threads, and all are added in an order that follows
// from the row alone.

#include <omp.h>

#include <atomic>

#include "attention.h"
#include "linear.h"
#include "sample.h"
#include "verify.h"

constexpr int64_t ALONE = 16;          // rows whose inputs every thread takes for itself, at most
constexpr int64_t LEAST_STRETCH = 32;  // of a quantised layer

struct Layer {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *mlp_norm;  // [hidden]
    const float *q_norm, *k_norm;        // [head_dim] or null
    int64_t window;                      // positions a row sees, itself included; 0 is all
    int64_t rotary;                      // whether queries and keys are rotated
};

struct Model {
    int64_t hidden, heads, kv_heads, head_dim, mlp, layers;
    const Layer *layer;
    const float *norm;  // [hidden], the final one
    Matrix head;
    Matrix adapter;             // added to what the last layer gives, or without data
    const float *adapter_norm;  // [hidden], of its input
    const void *embedding;  // [vocab, hidden]
    int32_t embedding_kind, cache_kind;
    float norm_eps;
};

struct Pass {
    int64_t batch, rows;
    int64_t computed;                   // rows of the block in front of them: in the cache
    const int64_t *tokens, *positions;  // [batch, rows]
    const int64_t *lengths;             // [batch] committed positions
    const int64_t *slots;               // [batch]
    void *const *keys, *const *values;  // per layer [slots, kv_heads, ..], a head as in `Head`
    int64_t capacity;                   // positions of a slot
    const int32_t *paths;               // [batch, rows, computed + rows] the block's rows that a
    const int64_t *depths;              // row sees, in order, and [batch, rows] their number; null
                                        // is causal
    const float *angles;                // [positions, 2, head_dim] cosines, signed sines
    const float *states;                // [batch * rows, hidden] in front of layer `first`, or null
    int64_t first;                      // layers that have run already
    float *const *taps;                 // null, or per layer null or [batch * rows, hidden]
    float *logits;                      // [batch * rows, vocab] or null
    int64_t *top;                       // [batch * rows] with the logits: the likeliest token
    float *top_logprob;                 // and its log-probability
    float *h, *qkv, *q, *attended, *act;  // room for [batch * rows, ..] of each
    Room room;         // of rows for which every thread fills its own, or of all rows
    float *sums_seen;  // [threads, 2, GROUP, padded head_dim]
    float *parts;      // [chunks, folded rows, padded head_dim + 2]
    int64_t widest;    // inputs of a layer, at most, rounded up to whole blocks
    int64_t last;      // layers to run the attention of
};

// A pass and further ones of a row each, over what every pass's last row draws: a draft.
struct Rollout {
    Pass *pass;
    int64_t steps;
    const int64_t *ends;        // [batch] the first pass's row that draws; behind it is padding
    const int64_t *budgets;     // [batch] tokens to draw; past it the last is fed again
    int64_t end;                // the last position there is
    const float *temperatures;  // [batch], or null: the likeliest
    Filters filters;
    const double *noise;        // [batch, steps], or null: they race
    const uint64_t *seeds;      // [batch], what races are keyed by
    const int64_t *starts;      // [batch] positions of the first tokens drawn
    int64_t *drawn;             // [batch, steps]
    float *p;                   // [batch, steps, vocab], what they were drawn from
    float *states;  // [batch, steps + 1, hidden] behind the last layer, of the first row that draws
                    // and of every token drawn, or null; the pass has a tap there
    int64_t *tokens, *positions, *lengths;  // [batch] of a pass behind the first
};

namespace {

template <class F>
void with_kind(int32_t kind, F f) {
    if (kind == BF16) return f(Bf16());
    if (kind == FP16) return f(Fp16());
    return f(Fp32());
}

int64_t padded(int64_t dim) { return (dim + WIDTH - 1) / WIDTH * WIDTH; }

// Where the threads of a pass meet. libgomp's barrier takes longer: it makes a system call each
// time, whether anybody sleeps or not.
class Meeting {
  public:
    // Waits until every thread has called it as often as this one: `due` calls in all.
    void wait(int due) {
        int seen = arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
        arrived.notify_all();
        for (int spins = 0; seen < due; seen = arrived.load(std::memory_order_acquire)) {
            if (spins++ < PATIENCE) relax();
            else arrived.wait(seen, std::memory_order_acquire);
        }
    }

  private:
    static constexpr int PATIENCE = 1 << 13;
    alignas(64) std::atomic<int> arrived{0};
};

// One thread of a pass.
class Worker {
  public:
    Worker(const Model &m, const Pass &p, Meeting &meeting, int thread, int threads)
        : m(m),
          p(p),
          meeting(meeting),
          thread(thread),
          threads(threads),
          count(p.batch * p.rows),
          alone(count <= ALONE),
          room(alone ? own_room() : p.room) {}

    void run() {
        share(count, [&](int64_t r) { p.first ? resume(r) : embed(r); });
        for (int64_t i = p.first; i < m.layers; i++) {
            const Layer &l = m.layer[i];
            store(l.qkv, inputs(l.qkv, p.h, l.input_norm), p.qkv);
            const int64_t each = m.heads + 2 * m.kv_heads;
            share(count * each, [&](int64_t k) { remember(l, i, k / each, k % each); });
            if (i >= p.last) return;
            attend_all(l, i);
            add(l.out, inputs(l.out, p.attended));
            gate(l.gate_up, inputs(l.gate_up, p.h, l.mlp_norm));
            add(l.down, inputs(l.down, p.act));
            if (p.taps && p.taps[i]) share(count, [&](int64_t r) { tap(r, p.taps[i]); });
        }
        if (!p.logits) return;
        if (m.adapter.data) {
            store(m.adapter, inputs(m.adapter, p.h, m.adapter_norm), p.act);
            share(count * m.hidden, [&](int64_t i) { p.h[i] += p.act[i]; });
        }
        store(m.head, inputs(m.head, p.h, m.norm), p.logits);
        share(count, [&](int64_t r) {
            find_top(p.logits + r * m.head.out, m.head.out, p.top + r, p.top_logprob + r);
        });
    }

  private:
    const Model &m;
    const Pass &p;
    Meeting &meeting;
    const int thread, threads;
    const int64_t count;
    const bool alone;  // whether every thread norms and converts all inputs for itself
    const Room room;
    int due = 0;

    // This thread's share of n pieces of work; then it waits for the others.
    template <class F>
    void share(int64_t n, F work) {
        for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; i++) work(i);
        wait();
    }

    void wait() { meeting.wait(due += threads); }

    void tap(int64_t r, float *states) {
        const float *h = p.h + r * m.hidden;
        std::copy(h, h + m.hidden, states + r * m.hidden);
    }

    void resume(int64_t r) {
        const float *from = p.states + r * m.hidden;
        std::copy(from, from + m.hidden, p.h + r * m.hidden);
    }

    void embed(int64_t r) {
        float *h = p.h + r * m.hidden;
        with_kind(m.embedding_kind, [&](auto kind) {
            typedef decltype(kind) Kind;
            const auto *from = (const typename Kind::Item *)m.embedding + p.tokens[r] * m.hidden;
            int64_t i = 0;
            for (; i + WIDTH <= m.hidden; i += WIDTH) Fp32::store(h + i, Kind::load(from + i));
            const int64_t rest = m.hidden - i;
            if (rest) store_some(h + i, load_some<Kind>(from + i, rest), rest);
        });
    }

    Room own_room() const {
        const int64_t row = thread * count, stretches = p.widest / LEAST_STRETCH;
        return {p.room.normed + row * m.hidden, p.room.rounded + row * p.widest,
                p.room.scales + row * stretches, p.room.sums + row * stretches};
    }

    // Rows x [count, in] as a layer's weights take them, behind an RMS norm if it has a weight. Of
    // few rows every thread takes all: that is quicker than to wait for a part from each.
    Inputs inputs(const Matrix &w, const float *x, const float *norm = nullptr) {
        const float *source = norm ? room.normed : x;
        auto take_row = [&](int64_t r) {
            if (norm) rms_norm(x + r * w.in, norm, w.in, m.norm_eps, room.normed + r * w.in);
            if (w.converts()) take(w, source + r * w.in, r, room);
        };
        if (!norm && !w.converts()) return taken(w, x, room);
        if (alone)
            for (int64_t r = 0; r < count; r++) take_row(r);
        else share(count, take_row);
        return taken(w, source, room);
    }

    // y = W x + b
    void store(const Matrix &w, const Inputs &x, float *y) {
        each_output(w, x, [&](int64_t r, int64_t i, float value) { y[r * w.out + i] = value; });
    }

    // h += W x + b
    void add(const Matrix &w, const Inputs &x) {
        each_output(w, x, [&](int64_t r, int64_t i, float value) { p.h[r * w.out + i] += value; });
    }

    template <class F>
    void each_output(const Matrix &w, const Inputs &x, F f) {
        linear(w, x, count, thread, threads,
               [&](int64_t r, int64_t block, int64_t from, int64_t to, const float *values) {
                   for (int64_t first : {from, HALF + from}) {
                       const int64_t last = std::min(first + to - from, w.out - block * BLOCK);
                       for (int64_t i = first; i < last; i++) f(r, block * BLOCK + i, values[i]);
                   }
               });
        wait();
    }

    // SiLU(gate) * up: a block holds 32 outputs of the one and the same 32 of the other.
    void gate(const Matrix &w, const Inputs &x) {
        linear(w, x, count, thread, threads,
               [&](int64_t r, int64_t block, int64_t from, int64_t to, const float *values) {
                   for (int64_t i = from; i < to; i += WIDTH) {
                       const Floats g = read<Floats>(values + i);
                       const Floats y = g / (1.0f + exp(-g)) * read<Floats>(values + HALF + i);
                       const int64_t at = block * HALF + i;
                       store_some(p.act + r * m.mlp + at, y, clamp(m.mlp - at));
                   }
               });
        wait();
    }

    static int64_t clamp(int64_t n) { return std::max<int64_t>(0, std::min<int64_t>(n, WIDTH)); }

    // Norms, rotates and scales a query of a row, or puts its key or value into the cache.
    void remember(const Layer &l, int64_t layer, int64_t r, int64_t number) {
        const int64_t dim = m.head_dim, wide = padded(dim), b = r / p.rows;
        float *x = p.qkv + (r * (m.heads + 2 * m.kv_heads) + number) * dim;
        const float *angles = l.rotary ? p.angles + p.positions[r] * 2 * dim : nullptr;
        if (number < m.heads) {
            turn(x, l.q_norm, angles);
            float *q = p.q + (r * m.heads + number) * wide;
            const float scale = 1.0f / std::sqrt((float)dim);
            for (int64_t i = 0; i < dim; i++) q[i] = x[i] * scale;
            std::fill(q + dim, q + wide, 0.0f);
            return;
        }
        const int64_t head = (number - m.heads) % m.kv_heads;
        const int64_t position = p.lengths[b] + p.computed + r % p.rows;
        with_kind(m.cache_kind, [&](auto kind) {
            typedef decltype(kind) Kind;
            typedef typename Kind::Item Item;
            const Head<Kind> at = cached<Kind>(layer, b, head);
            if (number >= m.heads + m.kv_heads)
                return keep<Kind>(x, const_cast<Item *>(at.values + position * wide), 1);
            turn(x, l.k_norm, angles);
            keep<Kind>(x, const_cast<Item *>(at.key(position)), LANES);
        });
    }

    void turn(float *x, const float *norm, const float *angles) {
        if (norm) rms_norm(x, norm, m.head_dim, m.norm_eps, x);
        if (angles) rotate(x, angles, m.head_dim);
    }

    // Puts a key or value where its elements lie `stride` apart.
    template <class Kind>
    void keep(const float *x, typename Kind::Item *at, int64_t stride) {
        for (int64_t i = 0; i < m.head_dim; i += WIDTH) {
            typename Kind::Item items[WIDTH];
            const int64_t some = clamp(m.head_dim - i);
            Kind::store(items, load_some<Fp32>(x + i, some));
            for (int64_t j = 0; j < some; j++) at[(i + j) * stride] = items[j];
        }
    }

    template <class Kind>
    Head<Kind> cached(int64_t layer, int64_t b, int64_t head) {
        typedef typename Kind::Item Item;
        const int64_t wide = padded(m.head_dim);
        const int64_t from = (p.slots[b] * m.kv_heads + head) * p.capacity * wide;
        return {(const Item *)p.keys[layer] + from, (const Item *)p.values[layer] + from, wide};
    }

    // The pairs (i, i + dim / 2); the first half of the sines carries the sign (Su et al., 2021).
    static void rotate(float *x, const float *angles, int64_t dim) {
        const float *cos = angles, *sin = angles + dim;
        const int64_t half = dim / 2;
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] + b * sin[i];
            x[i + half] = b * cos[i + half] + a * sin[i + half];
        }
    }

    // Query rows of one key-value head of one sequence are folded: rows, and heads within a row.
    int64_t folded() const { return p.rows * (m.heads / m.kv_heads); }

    View view(const Layer &l, int64_t b, int64_t head, int64_t i) const {
        const int64_t fold = m.heads / m.kv_heads, r = b * p.rows + i / fold;
        const int64_t seen = p.depths ? p.depths[r] : p.computed + i / fold + 1;
        const int64_t end = p.lengths[b] + seen;
        return {p.q + (r * m.heads + head * fold + i % fold) * padded(m.head_dim),
                p.paths ? p.paths + r * (p.computed + p.rows) : nullptr,
                l.window ? std::max<int64_t>(0, end - l.window) : 0, end, p.lengths[b]};
    }

    void finish(int64_t b, int64_t head, int64_t i, const Seen &seen) {
        const int64_t fold = m.heads / m.kv_heads, r = b * p.rows + i / fold;
        float *out = p.attended + (r * m.heads + head * fold + i % fold) * m.head_dim;
        for (int64_t d = 0; d < m.head_dim; d++) out[d] = seen.sum[d] / seen.mass;
    }

    // Chunks [begin, end) that folded rows [n] see anything of.
    static Range chunks(const View *views, int64_t n) {
        Range r = {views[0].begin, views[0].end};
        for (int64_t i = 1; i < n; i++) {
            r.begin = std::min(r.begin, views[i].begin);
            r.end = std::max(r.end, views[i].end);
        }
        return {r.begin / CHUNK, (r.end + CHUNK - 1) / CHUNK};
    }

    // Threads share the rows, or where these are few and the text is long, what they see.
    void attend_all(const Layer &l, int64_t layer) {
        const int64_t n = folded(), pairs = p.batch * m.kv_heads;
        const int64_t longest = *std::max_element(p.lengths, p.lengths + p.batch);
        const bool worth = longest >= 4 * threads * CHUNK;
        if (worth && pairs < threads && n <= GROUP) return attend_in_parts(l, layer);
        const int64_t wanted = std::max((n + GROUP - 1) / GROUP, threads / pairs);
        const int64_t groups = std::min(n, wanted);  // as many as keep all threads busy
        share(pairs * groups, [&](int64_t i) {
            const int64_t group = i % groups, head = i / groups % m.kv_heads;
            const int64_t from = group * n / groups, to = (group + 1) * n / groups;
            attend_group(l, layer, i / groups / m.kv_heads, head, from, to);
        });
    }

    void attend_group(const Layer &l, int64_t layer, int64_t b, int64_t head, int64_t from,
                      int64_t to) {
        const int64_t wide = padded(m.head_dim), n = to - from;
        View views[GROUP];
        Seen total[GROUP], part[GROUP];
        float *sums = p.sums_seen + thread * 2 * GROUP * wide;
        for (int64_t i = 0; i < n; i++) {
            views[i] = view(l, b, head, from + i);
            total[i] = {0, 0, sums + i * wide};
            part[i] = {0, 0, sums + (GROUP + i) * wide};
        }
        const Range all = chunks(views, n);
        with_kind(m.cache_kind, [&](auto kind) {
            typedef decltype(kind) Kind;
            const Head<Kind> keys = cached<Kind>(layer, b, head);
            for (int64_t c = all.begin; c < all.end; c++) {
                const bool first = c == all.begin;
                attend(views, n, keys, c * CHUNK, first ? total : part);
                if (first) continue;
                for (int64_t i = 0; i < n; i++) ::add(total[i], part[i], wide);
            }
        });
        for (int64_t i = 0; i < n; i++) finish(b, head, from + i, total[i]);
    }

    // The same with a sequence's chunks shared by the threads, and added up when all are there.
    void attend_in_parts(const Layer &l, int64_t layer) {
        const int64_t n = folded(), pairs = p.batch * m.kv_heads, wide = padded(m.head_dim);
        const int64_t size = wide + 2;
        View views[GROUP];
        auto look = [&](int64_t pair) {
            for (int64_t i = 0; i < n; i++)
                views[i] = view(l, pair / m.kv_heads, pair % m.kv_heads, i);
            return chunks(views, n);
        };
        int64_t count = 0;
        for (int64_t pair = 0; pair < pairs; pair++) {
            const Range all = look(pair);
            count += all.end - all.begin;
        }
        const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
        for (int64_t pair = 0, first = 0; pair < pairs; pair++) {
            const Range all = look(pair);
            const int64_t from = std::max(begin, first);
            const int64_t to = std::min(end, first + all.end - all.begin);
            with_kind(m.cache_kind, [&](auto kind) {
                typedef decltype(kind) Kind;
                const Head<Kind> keys = cached<Kind>(layer, pair / m.kv_heads, pair % m.kv_heads);
                for (int64_t u = from; u < to; u++) {
                    Seen seen[GROUP];
                    for (int64_t i = 0; i < n; i++)
                        seen[i].sum = p.parts + (u * n + i) * size;
                    attend(views, n, keys, (all.begin + u - first) * CHUNK, seen);
                    for (int64_t i = 0; i < n; i++) {
                        seen[i].sum[wide] = seen[i].most;
                        seen[i].sum[wide + 1] = seen[i].mass;
                    }
                }
            });
            first += all.end - all.begin;
        }
        wait();
        float *sum = p.sums_seen + thread * 2 * GROUP * wide;
        for (int64_t pair = 0, first = 0; pair < pairs; pair++) {
            const Range all = look(pair);
            for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; i++) {
                Seen total = {0, 0, sum};
                for (int64_t u = first; u < first + all.end - all.begin; u++) {
                    float *part = p.parts + (u * n + i) * size;
                    ::add(total, {part[wide], part[wide + 1], part}, wide);
                }
                finish(pair / m.kv_heads, pair % m.kv_heads, i, total);
            }
            first += all.end - all.begin;
        }
        wait();
    }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int outpace_width() { return WIDTH; }
int outpace_group() { return GROUP; }
int outpace_chunk() { return CHUNK; }
int outpace_alone() { return ALONE; }
int outpace_least_stretch() { return LEAST_STRETCH; }
int outpace_pairs_of_bf16() {
#ifdef PAIRS_OF_BF16
    return 1;
#else
    return 0;
#endif
}

void outpace_forward(const Model *model, const Pass *pass, int threads) {
    Meeting meeting;
#pragma omp parallel num_threads(threads)
    Worker(*model, *pass, meeting, omp_get_thread_num(), omp_get_num_threads()).run();
}

void outpace_rollout(const Model *model, const Rollout *rollout, int threads) {
    const Rollout &o = *rollout;
    Pass pass = *o.pass;
    const int64_t n = model->head.out, hidden = model->hidden;
    const float *tap = o.states ? pass.taps[model->layers - 1] : nullptr;
    for (int64_t step = 0; step < o.steps + (tap != nullptr); step++) {
        if (step == 1) {
            pass.rows = 1, pass.tokens = o.tokens;
            pass.positions = o.positions, pass.lengths = o.lengths;
        }
        if (step == o.steps) pass.logits = nullptr;  // of the last token its state alone
        outpace_forward(model, &pass, threads);
        for (int64_t b = 0; tap && b < pass.batch; b++) {
            const float *row = tap + (b * pass.rows + (step ? 0 : o.ends[b])) * hidden;
            std::copy(row, row + hidden, o.states + (b * (o.steps + 1) + step) * hidden);
        }
        if (step == o.steps) break;
#pragma omp parallel for num_threads(pass.batch > 1 ? threads : 1)
        for (int64_t b = 0; b < pass.batch; b++) {
            const int64_t row = b * pass.rows + (step ? 0 : o.ends[b]), at = b * o.steps + step;
            int64_t token = pass.top[row];
            if (o.temperatures) {
                const Filter filter = o.filters.of(b, n);
                warp(pass.logits + row * n, n, o.temperatures[b], filter, o.p + at * n);
                const float *law = o.p + at * n;
                token = o.noise ? draw_row(law, n, o.noise[at])
                                : race_row(law, n, o.seeds[b], o.starts[b] + step);
            }
            o.drawn[at] = token;
            if (step < o.budgets[b]) o.tokens[b] = token;
            if (step == 0) o.lengths[b] = o.pass->lengths[b] + o.ends[b] + 1;
            else if (step < o.budgets[b]) o.lengths[b]++;
            o.positions[b] = std::min(o.lengths[b], o.end);
        }
    }
}

void outpace_warp(const float *logits, int64_t batch, int64_t rows, int64_t n,
                  const float *temperatures, const int64_t *k, const float *top_p,
                  const float *min_p, float *p) {
    const Filters filters{k, top_p, min_p};
    for (int64_t r = 0; r < batch * rows; r++)
        warp(logits + r * n, n, temperatures[r / rows], filters.of(r / rows, n), p + r * n);
}

void outpace_draw(const float *p, int64_t rows, int64_t n, const double *u, int64_t *tokens) {
    for (int64_t r = 0; r < rows; r++) tokens[r] = draw_row(p + r * n, n, u[r]);
}

void outpace_race(const float *p, int64_t batch, int64_t rows, int64_t n, const uint64_t *seeds,
                  const int64_t *positions, int64_t *tokens) {
    for (int64_t r = 0; r < batch * rows; r++)
        tokens[r] = race_row(p + r * n, n, seeds[r / rows], positions[r]);
}

// Children of rows p [batch, rows, n], drawn without replacement; see `draw_children`.
void outpace_children(const float *p, const float *scores, int64_t batch, int64_t rows, int64_t n,
                      int64_t count, const double *u, const uint64_t *seeds,
                      const int64_t *positions, float *q, int64_t *tokens) {
    for (int64_t r = 0; r < batch * rows; r++) {
        const int64_t b = r / rows;
        draw_children(p + r * n, scores + r * n, n, count, u ? u + r * count : nullptr,
                      u ? 0 : seeds[b], u ? 0 : positions[b], q + r * count * n,
                      tokens + r * count);
    }
}

// Moves positions of a slot, ascending ones and none to behind where it was, to `base` and on.
void outpace_move(void *const *keys, void *const *values, int64_t layers, int64_t heads,
                  int64_t capacity, int64_t dim, int64_t size, int64_t slot,
                  const int64_t *source, int64_t count, int64_t base) {
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t head = slot * heads; head < (slot + 1) * heads; head++) {
            char *k = (char *)keys[layer] + head * capacity * dim * size;
            char *v = (char *)values[layer] + head * capacity * dim * size;
            for (int64_t i = 0; i < count; i++) {
                const int64_t from = source[i], to = base + i;
                if (from == to) continue;
                std::memmove(v + to * dim * size, v + from * dim * size, dim * size);
                char *a = k + (to / LANES * LANES * dim + to % LANES) * size;
                const char *b = k + (from / LANES * LANES * dim + from % LANES) * size;
                for (int64_t d = 0; d < dim; d++, a += LANES * size, b += LANES * size)
                    std::memcpy(a, b, size);
            }
        }
}

// By a rule of `Rule` in kernels/rows.py. Seeds and positions are for races, or null.
void outpace_verify(int32_t rule, const float *p, const float *q, const int64_t *drafted,
                    const int64_t *parents, int64_t batch, int64_t nodes, int64_t n,
                    const double *accept, const double *target, const uint64_t *seeds,
                    const int64_t *positions, int64_t *path, int64_t *accepted, int64_t *tokens) {
    for (int64_t b = 0; b < batch; b++) {
        const int64_t first = b * nodes;
        const Drafted draft{p + (first + b) * n, q ? q + first * n : nullptr, drafted + first,
                            parents + first,     accept + first,              target + first + b,
                            nodes,               n,
                            seeds ? seeds[b] : 0, uint64_t(positions ? positions[b] : 0)};
        Kept kept{path + first};
        std::fill(kept.path, kept.path + nodes, -1);
        verify(rule, draft, kept);
        accepted[b] = kept.count, tokens[b] = kept.token;
    }
}
}
#pragma GCC visibility pop
