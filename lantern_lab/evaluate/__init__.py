"""`lantern-hpu evaluate`: pictures of many settings, their metrics, and the page."""
