// A partition of the Python source together with the plan that Python put into its pickle.
package pk.reader;

import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonInputPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;

/** One partition; `json` is the plan's text, which executors parse again. */
public final class PlannedPartition implements InputPartition {
  private static final long serialVersionUID = 1L;

  final String json;
  private final int index;
  private final boolean streaming;

  private PlannedPartition(String json, int index, boolean streaming) {
    this.json = json;
    this.index = index;
    this.streaming = streaming;
  }

  /** Returns the partitions with their plans, or unchanged if one of them has none (G2). */
  static InputPartition[] wrap(InputPartition[] found) {
    InputPartition[] planned = new InputPartition[found.length];
    for (int at = 0; at < found.length; at++) {
      byte[] pickle = pickleOf(found[at]);
      String json = pickle == null ? null : Pickles.planIn(pickle);
      if (json == null || !Plan.isUsable(json)) {
        return found;
      }
      planned[at] =
          found[at] instanceof PythonInputPartition
              ? new PlannedPartition(json, ((PythonInputPartition) found[at]).index(), false)
              : new PlannedPartition(
                  json, ((PythonStreamingInputPartition) found[at]).index(), true);
    }
    return planned;
  }

  private static byte[] pickleOf(InputPartition one) {
    if (one instanceof PythonInputPartition) {
      return ((PythonInputPartition) one).pickedPartition();
    }
    if (one instanceof PythonStreamingInputPartition) {
      return ((PythonStreamingInputPartition) one).pickedPartition();
    }
    return null;
  }

  /** Returns Spark's own partition of the sections `[first, last)`, the first from `position`. */
  InputPartition python(int first, int last, long position) {
    byte[] pickle = Pickles.rest(json, first, last, position);
    return streaming
        ? new PythonStreamingInputPartition(index, pickle, scala.Option.empty())
        : new PythonInputPartition(index, pickle);
  }
}
