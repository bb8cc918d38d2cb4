// The rules that decide what a round keeps of one sequence's draft tree: verifiers/token.py,
// kseq.py, traversal.py, multipath.py, match.py and coupled.py say what they are, and decide the
// same in tensors.
//
// Rows are float, sums double. Nothing is read of nodes that are not visited.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sample.h"

// What a rule is given. Node -1 is the root.
struct Drafted {
    const float *p;          // [nodes + 1, n] behind the root and each node
    const float *q;          // [nodes, n] that each was drawn from; null where they were certain
    const int64_t *tokens;   // [nodes]
    const int64_t *parents;  // [nodes] that come first; -2 is padding
    const double *accept;    // [nodes]
    const double *target;    // [nodes + 1]
    int64_t nodes, n;
    uint64_t seed, position;  // of races; the position is that of the token behind the root

    bool holds(int64_t node) const { return parents[node] >= -1; }
    const float *row(int64_t node) const { return p + (node + 1) * n; }

    // What a node's own law gives its token.
    double chance(int64_t node) const { return q ? q[node * n + tokens[node]] : 1; }

    // Calls f with that law, a function of the token.
    template <class F>
    void with_law(int64_t node, F f) const {
        const float *law = q + node * n;
        const int64_t x = tokens[node];
        if (q) f([law](int64_t i) { return double(law[i]); });
        else f([x](int64_t i) { return double(i == x); });
    }
};

// What a rule decides: nodes from the root down, and the token behind them.
struct Kept {
    int64_t *path, count = 0, token = 0;
};

// f(0) + ... + f(n - 1), in eight partial sums.
template <class F>
double sum_of(F f, int64_t n) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int64_t j = 0; j < 8; j++) sums[j] += f(i + j);
    for (; i < n; i++) sums[i % 8] += f(i);
    for (int64_t half = 4; half; half /= 2)
        for (int64_t j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}

// Vectors that rules need for a while, kept for the next time.
class Scratch {
    static std::vector<std::vector<double>> &all() {
        static thread_local std::vector<std::vector<double>> vectors;
        return vectors;
    }
    static int64_t &used() {
        static thread_local int64_t count = 0;
        return count;
    }
    double *at = nullptr;

public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    ~Scratch() { used() -= at != nullptr; }

    // The same at every call. Who asks last must be gone first.
    double *get(int64_t n) {
        if (at) return at;
        if (used() == int64_t(all().size())) all().emplace_back();
        std::vector<double> &mine = all()[used()++];
        if (int64_t(mine.size()) < n) mine.resize(n);
        return at = mine.data();
    }
};

// Weights of the tokens behind a node: scale times p's row, or times what rejections left of it.
class Weights {
    const float *p;
    double *left = nullptr, scale;
    int64_t n;
    Scratch room;

    template <class F>
    auto with_row(F f) const {
        return left ? f(left) : f(p);
    }

public:
    Weights(const float *row, double mass, int64_t n) : p(row), scale(mass), n(n) {}

    // As at first, of another row.
    void restart(const float *row) { p = row, left = nullptr, scale = 1; }

    double operator()(int64_t i) const { return scale * (left ? left[i] : p[i]); }

    // The mass of (weights - law)+.
    template <class Law>
    double mass_without(Law law) const {
        const double by = scale;
        return with_row([&](const auto *row) {
            return sum_of([=](int64_t i) { return std::max(by * row[i] - law(i), 0.0); }, n);
        });
    }

    // Becomes that, divided by some mass.
    template <class Law>
    void take_away(Law law, double mass) {
        double *to = room.get(n);
        const double by = scale;
        with_row([&](const auto *row) {
            for (int64_t i = 0; i < n; i++) to[i] = std::max(by * row[i] - law(i), 0.0);
        });
        left = to, scale = 1 / mass;
    }

    int64_t drawn(double u) const {
        return with_row([&](const auto *row) {
            return draw([row](int64_t i) { return row[i]; }, n, u);
        });
    }
};

// Recursive rejection: verifiers/token.py.
inline void verify_by_token(const Drafted &d, Kept &kept) {
    Weights weights(d.row(-1), 1, d.n);
    int64_t at = -1;
    for (int64_t node = 0; node < d.nodes; node++) {
        if (d.parents[node] != at) continue;
        const double qx = d.chance(node);
        if (d.accept[node] * qx < weights(d.tokens[node]) && qx > 0) {
            kept.path[kept.count++] = at = node;
            weights.restart(d.row(node));
            continue;
        }
        d.with_law(node, [&](auto law) {
            const double mass = weights.mass_without(law);
            if (mass > 0) weights.take_away(law, mass);
        });
    }
    kept.token = weights.drawn(d.target[kept.count]);
}

// Goes down along the tokens that the target wants behind each node: wanted(row, depth).
template <class Wanted>
void follow(const Drafted &d, Kept &kept, Wanted wanted) {
    kept.token = wanted(d.row(-1), 0);
    int64_t at = -1;
    for (int64_t node = 0; node < d.nodes; node++) {
        if (d.parents[node] != at || d.tokens[node] != kept.token) continue;
        kept.path[kept.count++] = at = node;
        kept.token = wanted(d.row(node), kept.count);
    }
}

// How much mass b is hit by one of so many draws, over b.
inline double hit_over(double b, int64_t draws) {
    double sum = 1;
    for (int64_t j = 1; j < draws; j++) sum = sum * (1 - b) + 1;
    return sum;
}

// The mass of min(q, p / rho).
inline double overlap(const float *p, const float *q, int64_t n, double rho) {
    return sum_of([=](int64_t i) { return std::min<double>(q[i], p[i] / rho); }, n);
}

// The least rho at which so many draws from q hit the overlap at most rho times as often as one.
inline double least_rho(const float *p, const float *q, int64_t n, int64_t draws) {
    double low = 1, high = draws;
    if (hit_over(overlap(p, q, n, low), draws) <= low) return low;
    static thread_local std::vector<std::pair<double, double>> open;  // of ratios between them
    double of_q = 0, of_p = 0;
    open.clear();
    for (int64_t i = 0; i < n; i++)
        if (p[i] > 0 && q[i] > 0) open.emplace_back(p[i], q[i]);
    for (int step = 0; step < 40; step++) {
        size_t left = 0;
        for (const auto &[a, b] : open) {
            if (a >= high * b) of_q += b;
            else if (a <= low * b) of_p += a;
            else open[left++] = {a, b};
        }
        open.resize(left);
        const double middle = (low + high) / 2;
        double mass = of_q + of_p / middle;
        for (const auto &[a, b] : open) mass += std::min(b, a / middle);
        (hit_over(mass, draws) <= middle ? high : low) = middle;
    }
    return high;
}

// K-SEQ: verifiers/kseq.py.
inline void verify_by_kseq(const Drafted &d, Kept &kept) {
    const float *p = d.row(-1), *q = nullptr;
    int64_t at = -1, draws = 0;
    double rho = 1;
    for (int64_t node = 0; node < d.nodes; node++) {
        if (d.parents[node] != at) continue;
        if (!q) {
            q = d.q + node * d.n;
            draws = std::count(d.parents + node, d.parents + d.nodes, at);
            rho = least_rho(p, q, d.n, draws);
        }
        const double qx = d.chance(node);
        if (!(d.accept[node] * rho * qx < p[d.tokens[node]] && qx > 0)) continue;
        kept.path[kept.count++] = at = node;
        p = d.row(node), q = nullptr;
    }
    const double u = d.target[kept.count];
    if (q) {
        const double hit = hit_over(overlap(p, q, d.n, rho), draws);
        const auto rest = [=](int64_t i) {
            return std::max(p[i] - hit * std::min<double>(q[i], p[i] / rho), 0.0);
        };
        if (sum_of(rest, d.n) > 0) {
            kept.token = draw(rest, d.n, u);
            return;
        }
    }
    kept.token = draw_row(p, d.n, u);
}

// Traversal verification: verifiers/traversal.py. Of a chain that is block verification.
template <class Draft>
class Traversal {
    const Draft &d;
    Kept &kept;
    std::vector<int64_t> first, next;  // child of the root and every node; sibling of every node

    // Ends the path at a node, with a draw from its weights.
    bool end(int64_t node, const Weights &weights) {
        for (int64_t at = node; at >= 0; at = d.parents[at]) kept.path[kept.count++] = at;
        std::reverse(kept.path, kept.path + kept.count);
        kept.token = weights.drawn(d.target[kept.count]);
        return true;
    }

    // Whether the path ends in a node's subtree. The mass is that of its weights.
    bool visit(int64_t node, double mass) {
        Weights weights(d.row(node), mass, d.n);
        for (int64_t child = first[node + 1]; child >= 0; child = next[child]) {
            const double qx = d.chance(child), weight = weights(d.tokens[child]);
            if (qx > 0 && weight > 0 && visit(child, std::min(1.0, weight / qx))) return true;
            d.with_law(child, [&](auto law) {
                const double rest = weights.mass_without(law), whole = rest + (1 - mass);
                if (!(whole > 0)) return;
                weights.take_away(law, whole);
                mass = rest / whole;
            });
        }
        return (node < 0 || d.accept[node] < mass) && end(node, weights);
    }

public:
    Traversal(const Draft &d, Kept &kept) : d(d), kept(kept), first(d.nodes + 1, -1) {
        next.assign(d.nodes, -1);
        for (int64_t node = d.nodes - 1; node >= 0; node--) {
            if (!d.holds(node)) continue;
            int64_t &eldest = first[d.parents[node] + 1];
            next[node] = eldest, eldest = node;
        }
        visit(-1, 1);
    }
};

// ((f + g)^paths - f^paths) / g, without cancellation.
inline double share_over(double f, double g, int64_t paths) {
    double sum = 1, power = 1;
    for (int64_t j = 1; j < paths; j++) power *= f + g, sum = sum * f + power;
    return sum;
}

// The largest of several paths as a draft of its own: verifiers/multipath.py.
class ChosenPath : public Drafted {
    // A prefix of it: its rows, and the mass of smaller prefixes (f) and its own (g), of both.
    struct Prefix {
        const float *p, *q;
        double f, g, chance;  // that its law gives the path's next token

        float ratio(int64_t i) const { return q[i] > 0 ? float(double(p[i]) / q[i]) : -1; }

        bool smaller(int64_t a, int64_t b) const {
            const float one = ratio(a), other = ratio(b);
            return one < other || (one == other && a < b);
        }
    };
    std::vector<Prefix> prefixes;
    std::vector<int64_t> depth;  // of each node of the path, -1 elsewhere
    int64_t paths = 0;
    Scratch room;
    double *law;

    // How often the path goes on with a token that has so much mass, and so much before it.
    double chance_of(const Prefix &x, double mass, double before) const {
        const double grown = share_over(x.f + x.g * before, x.g * mass, paths);
        return mass * grown / share_over(x.f, x.g, paths);
    }

    // The largest next token of paths that have a prefix in common.
    int64_t largest(const Prefix &x, const std::vector<int64_t> &open) const {
        int64_t most = tokens[open[0]];
        for (const int64_t node : open)
            if (x.smaller(most, tokens[node])) most = tokens[node];
        return most;
    }

    void choose() {
        std::vector<int64_t> next(nodes, -1), open;  // the nodes behind the prefix
        for (int64_t node = 0; node < nodes; node++) {
            if (parents[node] == -1) open.push_back(node);
            if (parents[node] >= 0) next[parents[node]] = node;
        }
        paths = open.size();
        double f = 0, g = 1;
        int64_t end = -1;
        while (!open.empty()) {
            Prefix x{Drafted::row(end), q + open[0] * n, f, g, 0};
            const int64_t most = largest(x, open);
            std::erase_if(open, [&](int64_t node) { return tokens[node] != most; });
            end = open[0];
            const auto less = [&](int64_t i) { return x.smaller(i, most) ? double(x.q[i]) : 0.0; };
            const double before = sum_of(less, n), mass = x.q[most];
            x.chance = chance_of(x, mass, before);
            prefixes.push_back(x);
            const double smaller = f + g * before, own = g * mass, all = smaller + own;
            f = all > 0 ? smaller / all : 0, g = all > 0 ? own / all : 1;
            for (int64_t &node : open) node = next[node];
            std::erase(open, -1);
        }
        prefixes.push_back({Drafted::row(end), nullptr, f, g, 0});
        int64_t length = prefixes.size() - 1;
        for (int64_t node = end; node >= 0; node = parents[node]) depth[node] = --length;
    }

    // Tokens that q can draw, in ascending order.
    const std::vector<uint64_t> &ranked(const Prefix &x) const {
        static thread_local std::vector<uint64_t> some, other;
        some.clear();
        for (int64_t i = 0; i < n; i++)
            if (x.q[i] > 0) some.push_back(uint64_t{bits<uint32_t>(x.ratio(i))} << 32 | i);
        other.resize(some.size());
        for (int shift = 32; shift < 64; shift += 11) {  // a radix sort by the ratio
            int64_t starts[2049] = {};
            const auto digit = [shift](uint64_t key) { return key >> shift & 2047; };
            for (const uint64_t key : some) starts[digit(key) + 1]++;
            for (int64_t i = 0; i < 2047; i++) starts[i + 1] += starts[i];
            for (const uint64_t key : some) other[starts[digit(key)]++] = key;
            some.swap(other);
        }
        return some;
    }

public:
    explicit ChosenPath(const Drafted &d) : Drafted(d), depth(d.nodes, -1), law(room.get(d.n)) {
        choose();
    }

    bool holds(int64_t node) const { return depth[node] >= 0; }
    const float *row(int64_t node) const { return prefixes[node < 0 ? 0 : depth[node] + 1].p; }
    double chance(int64_t node) const { return prefixes[depth[node]].chance; }

    template <class F>
    void with_law(int64_t node, F f) const {
        const Prefix &x = prefixes[depth[node]];
        double before = 0;
        std::fill(law, law + n, 0.0);
        for (const uint64_t key : ranked(x)) {
            const int64_t i = key & 0xFFFFFFFF;
            law[i] = chance_of(x, x.q[i], before);
            before += x.q[i];
        }
        const double *row = law;
        f([row](int64_t i) { return row[i]; });
    }
};

enum Rule : int32_t { TOKEN, KSEQ, TRAVERSAL, MULTIPATH, MATCH, COUPLED };  // as in kernels/rows.py

inline void verify(int32_t rule, const Drafted &d, Kept &kept) {
    if (rule == TOKEN) verify_by_token(d, kept);
    if (rule == KSEQ) verify_by_kseq(d, kept);
    if (rule == TRAVERSAL) Traversal<Drafted>(d, kept);
    if (rule == MULTIPATH) Traversal<ChosenPath>(ChosenPath(d), kept);
    if (rule == MATCH)
        follow(d, kept, [&](const float *p, int64_t depth) {
            return draw_row(p, d.n, d.target[depth]);
        });
    if (rule == COUPLED)
        follow(d, kept, [&](const float *p, int64_t depth) {
            return race_row(p, d.n, d.seed, d.position + depth);
        });
}
