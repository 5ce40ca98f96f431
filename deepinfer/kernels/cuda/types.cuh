// Unsigned integers by their bits. Kernels are compiled without headers of the C library, which would have such names.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
