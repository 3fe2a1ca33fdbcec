/* What this processor can do. Built into the baseline library, which asks before the AVX2 one is loaded. */
int ps_has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}
