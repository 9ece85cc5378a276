// The ordered sets that index the cells of a long sequence, from one that has gone to the next one.
// Where cells are positions these sets are the same for every sequence of a length, and changing hands takes no time;
// inserting or erasing 100 000 tokens in them takes a tenth of a second, in which every other sequence would wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "llama.h"

class cells_stash {
public:
    struct sets {
        std::set<uint32_t>                       used;       // 0, 1, ...
        std::set<std::pair<llama_pos, uint32_t>> positions;  // (0, 0), (1, 1), ...
    };

    static constexpr size_t N_MIN = 4096;     // tokens; fewer are erased as ever
    static constexpr size_t N_MAX = 1 << 20;  // of all that is kept: 88 bytes each

    // Never destroyed, as sets may be given back until the process ends.
    static cells_stash & all() {
        static auto * stash = new cells_stash;
        return *stash;
    }

    void give(sets s) {
        std::vector<sets> gone;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            n_kept += s.used.size();
            kept.push_back(std::move(s));
            while (n_kept > N_MAX) {
                n_kept -= kept.front().used.size();
                gone.push_back(std::move(kept.front()));
                kept.erase(kept.begin());
            }
        }
        if (!gone.empty()) {
            std::thread([gone = std::move(gone)]() mutable { gone.clear(); }).detach();
        }
    }

    // Sets of at most n cells, those nearest to it; empty ones when there are none.
    sets take(size_t n) {
        sets s;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            auto                              best = kept.end();
            for (auto it = kept.begin(); it != kept.end(); ++it) {
                if (it->used.size() <= 4 * n && (best == kept.end() || distance(*it, n) < distance(*best, n))) {
                    best = it;
                }
            }
            if (best == kept.end()) {
                return s;
            }
            n_kept -= best->used.size();
            s = std::move(*best);
            kept.erase(best);
        }
        while (s.used.size() > n) {
            s.used.erase(std::prev(s.used.end()));
            s.positions.erase(std::prev(s.positions.end()));
        }
        return s;
    }

private:
    static size_t distance(const sets & s, size_t n) {
        return s.used.size() > n ? s.used.size() - n : n - s.used.size();
    }

    std::mutex        mutex;
    std::vector<sets> kept;
    size_t            n_kept = 0;
};
