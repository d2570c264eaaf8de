/* All kernels as one translation unit: one compilation for each architecture. */
#include "code.cu"
#include "copy.cu"
#include "crc.cu"
#include "delay.cu"
#include "ids.cu"
#include "pack.cu"
#include "pattern.cu"
#include "ring.cu"
