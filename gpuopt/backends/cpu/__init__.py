"""The backend of host memory."""
