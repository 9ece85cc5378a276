// The parts of a quantized product that was split along its inner dimension, added up by many threads at once. Same
// order of the sum, so the same bits.
#ifndef LLAMAMG_MMQ_FIXUP_H
#define LLAMAMG_MMQ_FIXUP_H

#include <cstdint>

#ifdef __CUDACC__
#define MMQ_FIXUP_BOTH __host__ __device__
#else
#define MMQ_FIXUP_BOTH
#endif

namespace mmq_fixup {

struct place {
    int row, column, channel, sample;  // rows and columns in tiles
};

// A product's tiles in order, each with n_inner blocks of the inner dimension; n_ranges CUDA blocks computed as many
// ranges of all these blocks, equally long up to rounding. Where a range ends inside a tile, its sums for that tile are
// in `parts`; the range that ends the tile has written its own to `dst`.
struct product {
    const int32_t * ids_dst;        // with experts: where a column goes; else nullptr
    const int32_t * expert_bounds;  // with experts: first column of each, and the end
    float *         dst;
    const float *   parts;                                         // [range][column][row] of a tile
    int64_t         stride_column, stride_channel, stride_sample;  // of dst
    int             n_rows, n_columns;
    int             n_inner, n_inner_step;                  // of a tile; and what begins of ranges are rounded down to
    int             n_tile_columns, n_channels, n_samples;  // with experts: a channel each
    int             n_tiles, n_ranges;
    int             width, height;  // columns and rows of a tile

    // First block of a range, counted over all tiles.
    MMQ_FIXUP_BOTH int begin_of(int range) const {
        const int even = int(int64_t(range) * n_tiles * n_inner / n_ranges);
        return even - even % n_inner % n_inner_step;
    }

    // Whose tile a CUDA block looks at: with few tiles that of the range which ends the block's tile, else of its own.
    MMQ_FIXUP_BOTH int range_of_block(int block) const {
        return n_tiles <= n_ranges ? int((int64_t(block + 1) * n_ranges + n_tiles - 1) / n_tiles) - 1 : block;
    }

    // Whether a range ends the tile that it begins in, and others have computed the begin of that tile.
    MMQ_FIXUP_BOTH bool is_split(int range) const {
        const int begin = begin_of(range);
        const int from  = begin / n_inner * n_inner;
        return begin != from && begin_of(range + 1) >= from + n_inner;
    }

    // Columns come first, then channels, samples, rows.
    MMQ_FIXUP_BOTH place place_of(int tile) const {
        const int column = tile % n_tile_columns, rest = tile / n_tile_columns;
        return { rest / n_channels / n_samples, column, rest % n_channels, rest / n_channels % n_samples };
    }
};

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

// Queues the addition on a cudaStream_t; false where the switch quick-fixup is off, or it is not for such tiles.
bool queue(const product & p, void * stream);

#else

inline bool queue(const product &, void *) {
    return false;
}

#endif

}  // namespace mmq_fixup

#undef MMQ_FIXUP_BOTH

#endif
