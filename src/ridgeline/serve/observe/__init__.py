"""What a server tells of itself: metrics, spans, live views, explanations."""
