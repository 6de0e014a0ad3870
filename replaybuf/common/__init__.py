"""What every room uses: checks of arguments, texts, units, progress, files, cancellation."""
