"""Our ServerApp, which does something more after each round."""

import flwr_distill.server.app
import flwr_distill.server.task


def app_that_does(after_round):
    """Our ServerApp; `after_round` takes the number of a round before its model is evaluated."""
    evaluation = flwr_distill.server.task.server_evaluation

    def create(*arguments):
        evaluate = evaluation(*arguments)

        def evaluated(server_round, arrays):
            after_round(server_round)
            return evaluate(server_round, arrays)

        return evaluated

    flwr_distill.server.task.server_evaluation = create
    return flwr_distill.server.app.app
