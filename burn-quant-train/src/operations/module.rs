//! Operations of modules.

/// Gives the operations to a macro: see [`operations`](crate::operations).
macro_rules! module_operations {
    ($forward:ident) => {
        $forward! {
            linear_x_backward(weight: Float, output_grad: Float) -> Float => Promote;
            linear_weight_backward(x: Float, output_grad: Float) -> Float => Promote;
            linear_bias_backward(output_grad: Float) -> Float => Promote;
            conv1d(x: Float, weight: Float, bias: OptFloat, options: (ConvOptions<1>)) -> Float => Compute;
            conv1d_x_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<1>)) -> Float => Promote;
            conv1d_weight_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<1>)) -> Float => Promote;
            conv1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
            conv2d(x: Float, weight: Float, bias: OptFloat, options: (ConvOptions<2>)) -> Float => Compute;
            conv2d_x_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<2>)) -> Float => Promote;
            conv2d_weight_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<2>)) -> Float => Promote;
            conv2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
            deform_conv2d(x: Float, offset: Float, weight: Float, mask: OptFloat, bias: OptFloat,
                options: (DeformConvOptions<2>)) -> Float => Compute [exact: offset];
            conv3d(x: Float, weight: Float, bias: OptFloat, options: (ConvOptions<3>)) -> Float => Compute;
            conv3d_x_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<3>)) -> Float => Promote;
            conv3d_weight_backward(x: Float, weight: Float, output_grad: Float, options: (ConvOptions<3>)) -> Float => Promote;
            conv3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
            conv_transpose1d(x: Float, weight: Float, bias: OptFloat, options: (ConvTransposeOptions<1>)) -> Float => Compute;
            conv_transpose1d_x_backward(weight: Float, output_grad: Float,
                options: (ConvTransposeOptions<1>)) -> Float => Promote;
            conv_transpose1d_weight_backward(x: Float, weight: Float, output_grad: Float,
                options: (ConvTransposeOptions<1>)) -> Float => Promote;
            conv_transpose1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
            conv_transpose2d(x: Float, weight: Float, bias: OptFloat, options: (ConvTransposeOptions<2>)) -> Float => Compute;
            conv_transpose2d_x_backward(weight: Float, output_grad: Float,
                options: (ConvTransposeOptions<2>)) -> Float => Promote;
            conv_transpose2d_weight_backward(x: Float, weight: Float, output_grad: Float,
                options: (ConvTransposeOptions<2>)) -> Float => Promote;
            conv_transpose2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
            conv_transpose3d(x: Float, weight: Float, bias: OptFloat, options: (ConvTransposeOptions<3>)) -> Float => Compute;
            conv_transpose3d_x_backward(weight: Float, output_grad: Float,
                options: (ConvTransposeOptions<3>)) -> Float => Promote;
            conv_transpose3d_weight_backward(x: Float, weight: Float, output_grad: Float,
                options: (ConvTransposeOptions<3>)) -> Float => Promote;
            conv_transpose3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float => Promote;
            unfold4d(x: Float, kernel_size: ([usize; 2]), options: (UnfoldOptions)) -> Float;
            avg_pool1d(x: Float, kernel_size: (usize), stride: (usize), padding: (usize), count_include_pad: (bool),
                ceil_mode: (bool)) -> Float;
            avg_pool1d_backward(x: Float, grad: Float, kernel_size: (usize), stride: (usize), padding: (usize),
                count_include_pad: (bool), ceil_mode: (bool)) -> Float => Promote;
            avg_pool2d(x: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
                count_include_pad: (bool), ceil_mode: (bool)) -> Float;
            avg_pool2d_backward(x: Float, grad: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
                count_include_pad: (bool), ceil_mode: (bool)) -> Float => Promote;
            adaptive_avg_pool2d(x: Float, output_size: ([usize; 2])) -> Float;
            adaptive_avg_pool2d_backward(x: Float, grad: Float) -> Float => Promote;
            adaptive_avg_pool1d(x: Float, output_size: (usize)) -> Float;
            adaptive_avg_pool1d_backward(x: Float, grad: Float) -> Float => Promote;
            max_pool1d(x: Float, kernel_size: (usize), stride: (usize), padding: (usize), dilation: (usize),
                ceil_mode: (bool)) -> Float;
            max_pool2d(x: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
                dilation: ([usize; 2]), ceil_mode: (bool)) -> Float;
            interpolate(x: Float, output_size: ([usize; 2]), options: (InterpolateOptions)) -> Float;
            interpolate_backward(x: Float, grad: Float, output_size: ([usize; 2]),
                options: (InterpolateOptions)) -> Float => Promote;
            ctc_loss(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, blank: (usize)) -> Float
                => Full [exact: log_probs];
            has_ctc_loss_backward() -> (bool);
            ctc_loss_backward(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, grad_loss: Float,
                blank: (usize)) -> Float => Full;
            rfft(signal: Float, dim: (usize), n: (Option<usize>)) -> FloatPair => Full;
            irfft(spectrum_re: Float, spectrum_im: Float, dim: (usize), n: (Option<usize>)) -> Float => Full;
            deform_conv2d_backward(x: Float, offset: Float, weight: Float, mask: OptFloat, bias: OptFloat,
                output_grad: Float, options: (DeformConvOptions<2>)) -> DeformConv2dBackward;
            max_pool1d_with_indices(x: Float, kernel_size: (usize), stride: (usize), padding: (usize),
                dilation: (usize), ceil_mode: (bool)) -> MaxPool1dWithIndices;
            max_pool1d_with_indices_backward(x: Float, kernel_size: (usize), stride: (usize), padding: (usize),
                dilation: (usize), ceil_mode: (bool), output_grad: Float, indices: Int) -> MaxPool1dBackward;
            max_pool2d_with_indices(x: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]),
                dilation: ([usize; 2]), ceil_mode: (bool)) -> MaxPool2dWithIndices;
            max_pool2d_with_indices_backward(x: Float, kernel_size: ([usize; 2]), stride: ([usize; 2]),
                padding: ([usize; 2]), dilation: ([usize; 2]), ceil_mode: (bool), output_grad: Float,
                indices: Int) -> MaxPool2dBackward;
        }
    };
}

pub(crate) use module_operations;
