// Header of kernels compiled from the text of kernel sections.

#ifndef WARPLINK_SECTIONS_CUH
#define WARPLINK_SECTIONS_CUH

#include <warplink/announcements.cuh>
#include <warplink/rows.cuh>
#include <warplink/steps.cuh>
#include <warplink/values.cuh>
#include <warplink/views.cuh>

#endif
