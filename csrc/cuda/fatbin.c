/* Embeds the fatbin named by KVSWAP_FATBIN (a quoted path) with the assembler's .incbin, which needs no generated
 * source. Programs that compile csrc/ themselves need not define the macro. */
#include "cuda/fatbin.h"

#ifdef KVSWAP_FATBIN

/* 64-byte aligned: the driver reads 8-byte fields of the image. */
__asm__(".pushsection .rodata.kvs_fatbin, \"a\", %progbits\n"
        ".balign 64\n"
        ".globl kvs_fatbin\n"
        ".hidden kvs_fatbin\n"
        ".type kvs_fatbin, %object\n"
        "kvs_fatbin:\n"
        ".incbin \"" KVSWAP_FATBIN "\"\n"
        "kvs_fatbin_end:\n"
        ".byte 0\n" /* the object's size must not be 0 */
        ".size kvs_fatbin, . - kvs_fatbin\n"
        ".balign 8\n"
        ".globl kvs_fatbin_nbytes\n"
        ".hidden kvs_fatbin_nbytes\n"
        ".type kvs_fatbin_nbytes, %object\n"
        "kvs_fatbin_nbytes:\n"
        ".quad kvs_fatbin_end - kvs_fatbin\n"
        ".size kvs_fatbin_nbytes, 8\n"
        ".popsection\n");

_Static_assert(sizeof(size_t) == 8, "kvs_fatbin_nbytes is written as 8 bytes");

const char kvs_fatbin_archs[] = KVSWAP_FATBIN_ARCHS;

#else

const unsigned char kvs_fatbin[1] = {0};
const size_t kvs_fatbin_nbytes = 0;
const char kvs_fatbin_archs[] = "";

#endif
