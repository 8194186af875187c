#define FORMAT BFLOAT16
#include "kernels.h"
#define FORMAT FLOAT16
#include "kernels.h"
#define FORMAT FLOAT32
#include "kernels.h"
#include "integer_formats.h"
