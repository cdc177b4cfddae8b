// What kernels that are made of the text of kernel sections include.

#ifndef WARPLINK_SECTIONS_CUH
#define WARPLINK_SECTIONS_CUH

#include <warplink/announcements.cuh>
#include <warplink/rows.cuh>
#include <warplink/steps.cuh>
#include <warplink/values.cuh>
#include <warplink/views.cuh>

#endif
