"""What `python -m tests.loops` found before the library had a rule for recursions.

The numbers are for bfloat16, the worst leaf of values and gradients against f32.
"""

# Recursions that are wrong by more than 1.2 % with the products alone in half that the
# library has in half (recipe "OD"): by how much.
NEEDS = {
    "conjugate_gradients": 0.06,
    "conjugate_residuals_under_vmap": 0.064,
    "lanczos_tridiagonal": 0.044,
    "arnoldi_with_two_projections": 0.025,
    "power_iteration": 0.013,
    "square_root_by_coupled_newton": 0.018,
    "exponential_by_scaling_and_squaring": 0.099,
    "chebyshev_series_of_a_matrix": 0.088,
    "gram_schmidt_of_rows": 0.1,
    "lyapunov_equation_by_doubling": 0.024,
    "neumann_series": 0.018,
    "extended_kalman_filter_of_a_pendulum": 0.017,
    "recursive_least_squares": 0.028,
    "value_iteration": 0.05,
    "affine_bond_prices": 0.068,
    "american_option_on_a_chain": 0.046,
    "hamiltonian_monte_carlo": 1.7,
    "particle_filter": 0.016,
    "lasso_by_accelerated_shrinkage": 0.036,
    "heavy_ball_on_a_quadratic": 0.02,
    "total_variation_by_primal_and_dual": 0.024,
    "linear_program_by_interior_points": 73,
    "nonnegative_factors": 0.036,
    "optimal_transport_by_sinkhorn": 0.015,
    "richardson_lucy_deblurring": 0.19,
    "wave_by_leapfrog": 0.034,
    "seismic_wave_on_a_staggered_grid": 0.03,
    "coupled_springs_by_runge_kutta": 0.019,
    "schroedinger_equation_by_parts": 0.015,
    "ground_state_in_imaginary_time": 0.02,
    "chemical_kinetics": 0.039,
    "bodies_under_gravity": 0.031,
    "lattice_boltzmann_of_a_line": 0.062,
    "ages_of_a_population": 0.056,
    "chain_of_rigid_motions": 0.014,
    "quantum_circuit_of_rotations": 0.073,
    "adams_bashforth_of_a_rotation": 0.013,
}

# Recursions that would be wrong by more than 1.2 % with every product in half, and that
# the library has in f32: by how much they would be wrong.
ALREADY = {
    "eigenvalues_by_the_qr_algorithm": 0.07,
    "kaczmarz_rows": 0.32,
    "kalman_filter_in_a_dictionary": 0.08,
    "rauch_tung_striebel_smoother": 0.041,
    "ensemble_kalman_filter": 0.013,
    "linear_quadratic_regulator": 0.015,
    "factor_analysis_by_expectation_maximisation": 0.021,
    "lasso_by_splitting": 0.028,
    "curve_fit_by_levenberg_marquardt": 2.1e07,
    "inverse_kinematics_by_damped_steps": 0.23,
}

# Of `NEEDS`, those that keep a product in half in a loop, and why.
_ACTIVATION = "between its products stands a function of each element, as in a network"
HALF_IN_LOOPS = {
    "particle_filter": "weights by a softmax: nothing that they make is kept",
    "lasso_by_accelerated_shrinkage": _ACTIVATION,
    "total_variation_by_primal_and_dual": _ACTIVATION,
    "bodies_under_gravity": _ACTIVATION,
}

# Networks whose products are f32: recurrences with dense matrices and no activation.
# README names them. `policy.with_low("scan")` has them in half.
LINEAR = {
    "deep_linear_network",
    "graph_convolutions_without_activation",
    "delta_rule_of_fast_weights",
    "linear_state_space_layer",
}

# Networks with products in f32, and how many: of an operand that an f32 operation left
# (a softmax, a feature map), into a sum in f32, or in a loop until a float is small.
IN_F32_TODAY = {
    "layers_of_experts": 1,
    "equilibrium_until_it_rests": 1,
    "linear_attention_in_turns": 1,
    "layer_that_trains_at_test_time": 1,
    "training_until_a_loss": 5,
}
