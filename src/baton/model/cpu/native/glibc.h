// The names of glibc's functions as of its first version for this machine, so that a library that was compiled beside a
// newer glibc loads beside an older one (a wheel's tag, manylinux_2_28, says how old).  Since 2.34 the functions of
// libpthread have newer names in libc, and since 2.29 `log` has one that leaves out an error handler; they compute the
// same.  tests/model/cpu/test_native_library.py finds a function that is missing here.
#pragma once

#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define BATON_GLIBC(name) __asm__(".symver " #name ", " #name "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define BATON_GLIBC(name) __asm__(".symver " #name ", " #name "@GLIBC_2.17")
#endif

#ifdef BATON_GLIBC
BATON_GLIBC(log);
BATON_GLIBC(pthread_create);
BATON_GLIBC(pthread_detach);
BATON_GLIBC(pthread_sigmask);
#endif
