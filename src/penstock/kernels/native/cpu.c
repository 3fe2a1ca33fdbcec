/* What this processor can do. Built into the baseline library, which asks before the AVX2 one is loaded.

   Asked of the processor itself: `__builtin_cpu_supports` needs a symbol that Zig's runtime cannot link into a shared
   library. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif

int ps_has_avx2(void)
{
#if defined(__x86_64__)
    const unsigned fma = 1u << 12, osxsave = 1u << 27, avx2 = 1u << 5, bmi2 = 1u << 8, lzcnt = 1u << 5;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (fma | osxsave)) != (fma | osxsave))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) /* the system keeps the wide registers */
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & (avx2 | bmi2)) != (avx2 | bmi2))
        return 0;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & lzcnt);
#else
    return 0;
#endif
}
