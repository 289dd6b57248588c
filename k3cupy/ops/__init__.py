"""One module an operation: validate, return early when empty, choose the instance, launch."""
