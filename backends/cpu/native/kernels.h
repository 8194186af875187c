/* The decoder for one instruction set (ISA, V, LANES, MM, ADD_PAIRS, BY_PARITY, PAIRS, TILES) and one FORMAT; see decoder.c, which
 * includes it.
 *
 * Matrices lie as panels of PANEL outputs, so that memory is read once and in order. A gated matrix has in each panel half
 * gates, half what they gate. */

#include "vectors.h"
#include "products.h"
#include "attention.h"
#include "pass.h"

static const Kernels NAME(kernels) = {PANEL, NAME(pack), NAME(linear), NAME(decode)};
#undef FORMAT
