"""Bytes on disk: headers, spans, digests, and a case folder as it lies there."""
