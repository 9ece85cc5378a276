// The index rules of native/src/mmq_fixup.h, run on the host for test_mmq_fixup.py.
// Reads n_tile_columns n_channels n_samples n_tile_rows n_inner n_inner_step n_ranges, again and again. Writes for each
// CUDA block that adds up something: tile, its row, column, channel and sample, and the ranges that it adds up, then a
// line with a dot.
#include <algorithm>
#include <cstdio>

#include "mmq_fixup.h"

int main() {
    mmq_fixup::product p = {};
    int                n_tile_rows;
    while (std::scanf("%d %d %d %d %d %d %d", &p.n_tile_columns, &p.n_channels, &p.n_samples, &n_tile_rows, &p.n_inner,
                      &p.n_inner_step, &p.n_ranges) == 7) {
        p.n_tiles = p.n_tile_columns * p.n_channels * p.n_samples * n_tile_rows;
        for (int block = 0; block < std::min(p.n_tiles, p.n_ranges); ++block) {
            const int last = p.range_of_block(block);
            if (!p.is_split(last)) {
                continue;
            }
            const int  tile = p.begin_of(last) / p.n_inner;
            const auto at   = p.place_of(tile);
            std::printf("%d %d %d %d %d", tile, at.row, at.column, at.channel, at.sample);
            for (int range = last - 1;; --range) {
                if (p.begin_of(range) != p.begin_of(range + 1)) {
                    std::printf(" %d", range);
                }
                if (p.begin_of(range) <= tile * p.n_inner) {
                    break;
                }
            }
            std::puts("");
        }
        std::puts(".");
    }
}
