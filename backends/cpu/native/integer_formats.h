#define FORMAT INTEGERS
#include "kernels.h"
#define FORMAT INTEGERS_FLOAT32
#include "kernels.h"
