"""Events in: what happened in agents' sessions, from clients and transcripts to a Kafka topic."""
