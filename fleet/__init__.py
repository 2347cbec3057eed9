"""Running a federation: certificates, registration, submission, a federation on this machine, its checkup."""
