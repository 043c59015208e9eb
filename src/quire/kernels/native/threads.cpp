// The threads of a parallel region: those that torch uses, if the library runs on torch's OpenMP runtime.
#include <omp.h>

extern "C" int quire_threads() {
    int found = 0;
#pragma omp parallel
#pragma omp single
    found = omp_get_num_threads();
    return found;
}
