/* Whether liburing is here and new enough: both builds link this program. */
#include <liburing.h>

int main(void) {
  struct io_uring ring;
  int fd = -1;
  return io_uring_queue_init(1, &ring, 0) + io_uring_register_files_update(&ring, 0, &fd, 1);
}
