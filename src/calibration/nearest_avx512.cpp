#include "calibration/nearest_tile.h"

namespace kvpool::calibration {

const TileSearches kTileSearchesAvx512 = {search_tile<2>, search_tile<4>, search_tile<8>};

}  // namespace kvpool::calibration
