// A partition of the Python source together with the plan that Python put into its pickle.
package pk.reader;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
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

  /** The partitions for Spark, and for `explain` the way that their rows will take. */
  static final class Wrapped {
    final InputPartition[] partitions;
    final String way;

    Wrapped(InputPartition[] partitions, String way) {
      this.partitions = partitions;
      this.way = way;
    }
  }

  /** Returns the partitions with their plans, or unchanged if one of them has none (G2). */
  static Wrapped wrap(InputPartition[] found) {
    InputPartition[] planned = new InputPartition[found.length];
    Map<String, Integer> kinds = new TreeMap<>();
    for (int at = 0; at < found.length; at++) {
      byte[] pickle = pickleOf(found[at]);
      String json = pickle == null ? null : Pickles.planIn(pickle);
      String problem = json == null ? "Python made no plan" : Plan.problem(json);
      if (!problem.isEmpty()) {
        return new Wrapped(found, "Python: " + problem);
      }
      for (Plan.Section each : Plan.parse(json).sections) {
        kinds.merge(each.inWords(), 1, Integer::sum);
      }
      planned[at] =
          found[at] instanceof PythonInputPartition
              ? new PlannedPartition(json, ((PythonInputPartition) found[at]).index(), false)
              : new PlannedPartition(
                  json, ((PythonStreamingInputPartition) found[at]).index(), true);
    }
    List<String> words = new ArrayList<>();
    kinds.forEach((kind, count) -> words.add(kind + ": " + count));
    return new Wrapped(
        planned, found.length == 0 ? "nothing to read" : "JVM, ranges " + String.join(", ", words));
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
