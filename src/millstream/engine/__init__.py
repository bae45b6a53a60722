"""Messages, mailbox, owner loop, scheduler. Threads and the standard library only: nothing here knows MLX or HTTP."""
