"""The processor: the backend that keeps everything runnable anywhere."""
