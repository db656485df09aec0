/* Gives MLX on a Linux CPU a fast BLAS: exports the two 32-bit-index CBLAS calls that libmlx makes for real numbers
 * and forwards them to the OpenBLAS inside the numpy wheel, whose symbols carry a prefix, a suffix and 64-bit indices.
 * Preloaded, these definitions win over those of the reference BLAS that the mlx-cpu wheel brings.
 *
 * A product with one row (every matmul of a decode step for one request) goes to GEMV instead of GEMM: it is bound
 * by reading the weight matrix once, and GEMM would copy that matrix into panels first.
 */
#include <stdint.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

typedef int64_t wide;

#define DECLARE(T, GEMM, GEMV)                                                                        \
    extern void GEMM(int order, int trans_a, int trans_b, wide m, wide n, wide k, T alpha, const T *a, \
                     wide lda, const T *b, wide ldb, T beta, T *c, wide ldc);                          \
    extern void GEMV(int order, int trans, wide rows, wide columns, T alpha, const T *a, wide lda,     \
                     const T *x, wide step_x, T beta, T *y, wide step_y);

DECLARE(float, scipy_cblas_sgemm64_, scipy_cblas_sgemv64_)
DECLARE(double, scipy_cblas_dgemm64_, scipy_cblas_dgemv64_)

/* c[1,n] = op(a)[1,k] op(b)[k,n] is c^T = op(b)^T a^T: b transposed where it was not, and not where it was. */
#define DEFINE(NAME, T, GEMM, GEMV)                                                                          \
    void NAME(int order, int trans_a, int trans_b, int m, int n, int k, T alpha, const T *a, int lda,         \
              const T *b, int ldb, T beta, T *c, int ldc)                                                     \
    {                                                                                                         \
        if (order != ROW_MAJOR || m != 1) {                                                                   \
            GEMM(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                      \
            return;                                                                                           \
        }                                                                                                     \
        const wide step_a = trans_a == NO_TRANS ? 1 : lda;                                                    \
        if (trans_b == NO_TRANS)                                                                              \
            GEMV(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, a, step_a, beta, c, 1);                               \
        else                                                                                                  \
            GEMV(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, a, step_a, beta, c, 1);                            \
    }

DEFINE(cblas_sgemm, float, scipy_cblas_sgemm64_, scipy_cblas_sgemv64_)
DEFINE(cblas_dgemm, double, scipy_cblas_dgemm64_, scipy_cblas_dgemv64_)
